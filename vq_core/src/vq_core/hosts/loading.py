"""mlx-lm's ``load_prompt_cache`` finds our class in every process that has imported vq_core.

mlx-lm looks a saved cache's class up by bare name among the names of its own module.  That module is not imported
for it: a finder waits until somebody else does, and adds the name then.  (wrapt has such import hooks too; its
import alone takes eight times as long as that of vq_core.)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

MODULE, NAME = "mlx_lm.models.cache", "PackedKVCache"


class Stored:
    """Stands for :class:`vq_core.PackedKVCache` where mlx-lm looks for it, until ``compress`` puts it there itself."""

    @classmethod
    def from_state(cls, *state: Any) -> Any:
        """The cache of a state.

        Raises:
            HostError: an mlx-lm whose cache protocol vq does not know.
            FormatError, SettingsError, PluginError: as :meth:`vq_core.PackedKVCache.from_state`.
        """
        from vq_core.cache.shell import PackedKVCache
        from vq_core.hosts.mlx_lm.versions import check_version

        check_version()
        return PackedKVCache.from_state(*state)


class _Finder:
    """Finds nothing itself; has the loader that others find for :data:`MODULE` add the name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        others = (f for f in list(sys.meta_path) if f is not self and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module"):
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _add(module)

            loader.exec_module = exec_module
        return spec


def _add(module: ModuleType) -> None:
    if not hasattr(module, NAME):
        setattr(module, NAME, Stored)


def announce() -> None:
    """Add the name now if mlx-lm's module is there, else when it comes; further calls do nothing."""
    module = sys.modules.get(MODULE)
    if module is not None:
        _add(module)
    # It stays: taking it out while another thread walks the list would make that thread miss a finder.
    elif not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
