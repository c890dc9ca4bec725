"""mlx_lm.server with packed caches: what ``mlx_lm.load`` loads is compressed first.

``python server_child.py METHOD RESIDUAL`` and then the server's own arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx_lm.utils
from mlx_lm import server

import vq_core
from vq_core.testing import load_plugin, registered

method, residual = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
load_model = mlx_lm.utils.load_model


def load_and_compress(*args: Any, **kwargs: Any) -> Any:
    model, config = load_model(*args, **kwargs)
    vq_core.compress(model, method=method, residual=residual)
    return model, config


mlx_lm.utils.load_model = load_and_compress
with registered(load_plugin(Path(__file__).parent.parent / "methods" / "identity.py")):
    server.main()
