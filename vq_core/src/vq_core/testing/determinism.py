"""Equal input, equal bytes: in one process, in two, and without touching MLX's global random state."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from types import ModuleType

import mlx.core as mx

from vq_core.api.facts import Side
from vq_core.testing.kit import Kit, decode, pack, skip, whole
from vq_core.testing.observe import assert_same, gaussian, raw


class DeterminismConformance(Kit):
    """Everything random comes from ``ctx.seed``."""

    def test_same_again(self, text: str, side: Side) -> None:
        """Constants made twice from one seed, and one input packed twice, give the same bytes."""
        x = gaussian((1, self.kv_heads, whole(self.bind(text, side), 64), self.dim()), seed=21)
        runs = []
        for _ in range(2):
            bound = self.bind_anew(text, side)
            packed = pack(bound, x)
            runs.append({**packed, "decoded": decode(bound, packed, x.shape[2])})
        assert_same(runs[1], runs[0], f"{text}, {side}, bound again")

    def test_global_random_state_is_untouched(self, text: str, side: Side) -> None:
        """A number drawn from MLX afterwards is the number that would have come."""
        mx.random.seed(20)
        want = mx.random.normal((4,)).tolist()
        mx.random.seed(20)
        bound = self.bind_anew(text, side)
        x = gaussian((1, self.kv_heads, whole(bound, 32), self.dim()), seed=22)
        mx.eval(decode(bound, pack(bound, x), x.shape[2]))
        cache = self.cache(text, residual=0)
        cache.update_and_fetch(*self.tokens(160))
        mx.eval(cache.attend(gaussian((1, self.kv_heads, 1, self.dim())), scale=0.1))
        assert mx.random.normal((4,)).tolist() == want, f"{text}, {side}: the method draws from MLX's random state"

    def test_two_processes(self) -> None:
        """Another process, with another hash seed, packs the same bytes."""
        command = [sys.executable, "-m", "vq_core.testing.child", self.method, str(self.kv_heads), str(self.dim())]
        if self.plugin is not None:
            if not isinstance(self.plugin, ModuleType) or not self.plugin.__file__:
                skip("plugin", "an instance cannot be loaded in another process; give a module")
            command.append(str(self.plugin.__file__))
        env = os.environ | {"PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
        assert child.returncode == 0, child.stderr
        said = dict(line.split() for line in child.stdout.splitlines())
        for side in self.facts().sides:
            assert said[side] == self._digest(side), f"{self.method}, {side}: two processes pack different bytes"

    def _digest(self, side: Side) -> str:
        return digest(self, self.method, side)


def digest(kit: Kit, text: str, side: Side) -> str:
    """Hash of what a method stores for a fixed input."""
    bound = kit.bind_anew(text, side)
    x = gaussian((1, kit.kv_heads, whole(bound, 64), kit.dim()), seed=23)
    found = hashlib.sha256()
    for name, array in sorted(pack(bound, x).items()):
        found.update(name.encode() + raw(array).tobytes())
    return found.hexdigest()
