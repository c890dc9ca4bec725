"""mlx-lm: the only package that knows its protocol and its versions."""

from vq_core.hosts.mlx_lm.chat import Chat
from vq_core.hosts.mlx_lm.continuation import Continuation, resume
from vq_core.hosts.mlx_lm.draft import Draft
from vq_core.hosts.mlx_lm.fingerprint import identity
from vq_core.hosts.mlx_lm.generate import Run, load, load_with_config, stream
from vq_core.hosts.mlx_lm.loaded import Loaded, compress_loaded
from vq_core.hosts.mlx_lm.observe import observe
from vq_core.hosts.mlx_lm.prepare import CompressedModel, compress, compressed
from vq_core.hosts.mlx_lm.report import LayerEntry, ModelReport
from vq_core.hosts.mlx_lm.versions import check_version

__all__ = [
    "Chat", "CompressedModel", "Continuation", "Draft", "LayerEntry", "Loaded", "ModelReport", "Run", "check_version",
    "compress", "compress_loaded", "compressed", "identity", "load", "load_with_config", "observe", "resume", "stream",
]  # fmt: skip
