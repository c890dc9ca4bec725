"""Discovery of methods: installed plugins, one record each, whether or not they load.

Nothing in this package's import needs MLX.
"""

from vq_core.plugins.records import MethodRecord, Status
from vq_core.plugins.registry import list_methods, resolve

__all__ = ["MethodRecord", "Status", "list_methods", "resolve"]
