"""mlx-lm: the only package that knows its protocol and its versions."""

from vq_core.hosts.mlx_lm.prepare import CompressedModel, compress, compressed
from vq_core.hosts.mlx_lm.report import LayerEntry, ModelReport
from vq_core.hosts.mlx_lm.versions import check_version

__all__ = ["CompressedModel", "LayerEntry", "ModelReport", "check_version", "compress", "compressed"]
