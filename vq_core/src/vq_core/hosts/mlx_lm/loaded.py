"""``compress_loaded``: every model that mlx-lm loads in this process is compressed, whoever loads it."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx

from vq_core.cache.policy import CachePolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.errors import HostError
from vq_core.hosts.mlx_lm import hook
from vq_core.hosts.mlx_lm.draft import check_rewind
from vq_core.hosts.mlx_lm.prepare import CompressedModel, check_ways, compress, register
from vq_core.hosts.mlx_lm.report import ModelReport
from vq_core.hosts.mlx_lm.versions import check_version


@attrs.define(eq=False)
class Loaded:
    """What was loaded while :func:`compress_loaded` was in force.

    Attributes:
        policy: What every model is compressed with.
        errors: Models that could not be loaded or compressed, as (name, error); whoever loaded them has got the
            error too.
        files: Caches that mlx-lm has read from files, newest last.
        handles: Models as (name, handle), in the order of loading, without those that were dropped before another
            one was loaded.
        total: Models that were compressed, those included that were dropped.
        complete: Those of them whose tokenizer was loaded too.
    """

    policy: CachePolicy
    errors: list[tuple[str, Exception]] = attrs.Factory(list)
    files: list[list[Any]] = attrs.Factory(list)
    handles: list[tuple[str, CompressedModel]] = attrs.Factory(list)
    total: int = 0
    complete: int = 0

    def reports(self) -> list[tuple[str, ModelReport]]:
        """Of each model's caches made last; of those read from a file, where the model has made none since."""
        made = []
        for name, handle in self.handles:
            report = handle.report()
            if not any(r.tokens for r in report.packed_layers):
                fitting = [caches for caches in self.files if len(caches) == len(report.layers)]
                report = handle.report(fitting[-1]) if fitting else report
            made.append((name, report))
        return made

    def notes(self) -> list[str]:
        """What the user should know of caches from files, in words."""
        wanted = (self.policy.default.keys.text, self.policy.default.values.text)
        packed = [c for caches in self.files for c in caches if isinstance(c, PackedKVCache)]
        other = {(c.policy.keys.text, c.policy.values.text) for c in packed} - {wanted}
        said = [f"a cache read from a file keeps its own methods: keys {k}, values {v}" for k, v in sorted(other)]
        if self.files and not packed:
            said.append("the cache read from a file is not packed, and stays as it is")
        return said

    def _drop_unused(self) -> None:
        """Let go of models that nobody else holds, as a server does with its model before it loads another."""
        held = [(name, weakref.ref(handle)) for name, handle in self.handles]
        self.handles.clear()
        gc.collect()  # a model and its handle refer to each other
        self.handles.extend((name, handle) for name, reference in held if (handle := reference()) is not None)
        for _ in range(len(held) - len(self.handles)):
            hook.uninstall()  # a handle installs it, and only undo takes it back
        mx.clear_cache()

    def _undo(self) -> None:
        for _, handle in self.handles:
            handle.undo()


@contextlib.contextmanager
def compress_loaded(
    *, refused: Callable[[Loaded], None] | None = None, drafting: bool = False, **policy: Any
) -> Iterator[Loaded]:
    """Compress every model that mlx-lm loads inside the ``with`` block, draft models too.

    ``mlx_lm.utils.load_model`` is replaced, through which ``mlx_lm.load`` and all of mlx-lm's commands go; what was
    there is put back at the end, and the models give up their packed caches.

    Args:
        refused: Called, where a model is loaded, after an error of its loading or compression has been noted.
        drafting: Whether the models are for speculative decoding: one out of which rejected tokens cannot be taken
            again is then refused when it is loaded, else when speculation starts. How long a text gets is not known
            here, so a layer with a window, packed or the model's own, is a reason.
        policy: As for :func:`~vq_core.hosts.mlx_lm.compress`.

    Raises:
        SettingsError, PluginError: a policy that is not accepted, at once.
        HostError: an mlx-lm that vq does not know; while loading, a model that is spread over several processes.
            While loading or generating, SettingsError: a model that does not allow speculation.
    """
    check_version()
    from mlx_lm import utils
    from mlx_lm.models import cache

    register()
    ways = {name: policy.pop(name) for name in ("dense", "windows") if name in policy}
    check_ways(**ways)
    loaded = Loaded(CachePolicy.make(**policy))
    load, load_model = utils.load, utils.load_model
    speculate: Callable[..., Any] = sys.modules["mlx_lm.generate"].speculative_generate_step
    load_prompt_cache: Callable[..., Any] = cache.load_prompt_cache

    def load_compressed(model_path: Any, *args: Any, **kwargs: Any) -> Any:
        if mx.distributed.init().size() > 1:
            raise HostError("a model spread over several processes cannot be compressed: run it in one process")
        loaded._drop_unused()
        model, config = load_model(model_path, *args, **kwargs)
        handle = compress(model, **ways, **policy)
        if drafting:
            try:
                check_rewind(handle.fresh(), model, None, f"the model {model_path}")
            except BaseException:  # an interrupt too; it goes on once the model has its own caches back
                handle.undo()
                raise
        loaded.handles.append((str(model_path), handle))
        loaded.total += 1
        return model, config

    def load_complete(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        loaded.complete += 1
        return found

    def noting(loader: Callable[..., Any]) -> Callable[..., Any]:
        """Some commands call the inner one of the two loaders, some the outer one, which calls the inner."""

        def run(name: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return loader(name, *args, **kwargs)
            except Exception as error:  # an interrupt says nothing of the model
                if not any(known is error for _, known in loaded.errors):
                    loaded.errors.append((str(name), error))
                    if refused is not None:
                        refused(loaded)
                raise

        return run

    def speculate_checked(prompt: Any, model: Any, draft_model: Any, *args: Any, **kwargs: Any) -> Any:
        caches = kwargs.get("prompt_cache") or [*cache.make_prompt_cache(model), *cache.make_prompt_cache(draft_model)]
        count = len(model.layers)  # as mlx-lm tells the two apart
        check_rewind(caches[:count], model, None, "the model")
        check_rewind(caches[count:], draft_model, None, "the draft model")
        return speculate(prompt, model, draft_model, *args, **kwargs)

    def load_file(*args: Any, **kwargs: Any) -> Any:
        found = load_prompt_cache(*args, **kwargs)
        loaded.files.append(found[0] if isinstance(found, tuple) else found)
        return found

    with contextlib.ExitStack() as stack:
        stack.callback(loaded._undo)
        stack.enter_context(_replaced("load_model", load_model, noting(load_compressed)))
        stack.enter_context(_replaced("load", load, noting(load_complete)))
        stack.enter_context(_replaced("speculative_generate_step", speculate, speculate_checked))
        stack.enter_context(_replaced("load_prompt_cache", load_prompt_cache, load_file))
        yield loaded


@contextlib.contextmanager
def _replaced(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in every module of mlx-lm that holds it: some import it by name."""

    def exchange(was: Callable[..., Any], by: Callable[..., Any]) -> None:
        for key, module in list(sys.modules.items()):
            if key.split(".")[0] == "mlx_lm" and module is not None and module.__dict__.get(name) is was:
                setattr(module, name, by)

    exchange(old, new)
    try:
        yield
    finally:
        exchange(new, old)
