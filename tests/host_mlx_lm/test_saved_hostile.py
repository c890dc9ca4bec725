"""Files that were damaged, and files that somebody made up: one typed error, or caches that work."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as native

import vq_core
from vq_core import FormatError, PackedKVCache, VQError
from vq_core.cache import state_checks
from vq_core.files import tensors
from vq_core.hosts.mlx_lm import saved
from vq_core.testing import load_plugin, registered

from .test_saved import arrays_cache, content, filled

METHODS = Path(__file__).parent.parent / "methods"
CORRUPTIONS, EDITS = 1000, 600


@pytest.fixture(scope="module", autouse=True)
def _methods() -> Iterator[None]:
    with registered(load_plugin(METHODS / "centred.py")), registered(load_plugin(METHODS / "sign_sketch.py")):
        yield


def caches() -> list[Any]:
    """A bit of everything, small."""
    small = {"dims": (32, 32)}
    return [
        filled(PackedKVCache(method="kivi:bits=4", residual=8, sink_tokens=2), 60, **small),
        filled(PackedKVCache(keys="sign_sketch:sketch=64", values="centred", residual=8), 60, **small),
        PackedKVCache(method="kivi:bits=2", residual=8),
        native.CacheList(arrays_cache(True), filled(PackedKVCache(method="centred", residual=8), 50, **small)),
        filled(native.RotatingKVCache(16, keep=4), 20, **small),
        native.KVCache(),
        _short(filled(native.KVCache(), 20, **small)),
        filled(native.ChunkedKVCache(16), 20, **small),
        filled(native.QuantizedKVCache(32, 4), 20, **small),
    ]


def _short(cache: Any) -> Any:
    cache.keys, cache.values = cache.keys[:, :, :24], cache.values[:, :, :24]
    return cache


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("hostile") / "cache.vq"
    vq_core.save_cache(path, caches(), metadata={"a": "b"})
    return path.read_bytes()


# ---- damage


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """One random damage; half of them fall into the header."""
    (size,) = struct.unpack("<Q", whole[:8])
    end = rng.choice((8 + size, len(whole)))
    a, b = sorted(rng.randrange(end) for _ in range(2))
    data = bytearray(whole)
    kind = rng.randrange(8)
    if kind == 0:
        data[a] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[a : a + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 2:
        del data[a:]
    elif kind == 3:
        data[a:a] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 4:
        n = rng.randrange(1, 64)
        data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]
    elif kind == 5:
        data[a : a + 64] = bytes(64)
    elif kind == 6:  # an edit of the header with its length set right
        del data[8 + a % size : 8 + a % size + rng.randrange(1, 9)]
        data[:8] = struct.pack("<Q", size - (len(whole) - len(data)))
    else:
        data[:8] = struct.pack("<Q", rng.choice((0, 1, size - 1, size + 1, len(whole), 2**62, rng.randrange(2**64))))
    return bytes(data)


def test_1000_random_damages(file: bytes, tmp_path: Path) -> None:
    """Every file that differs in any byte is refused by one typed error."""
    path, rng, done = tmp_path / "cache.vq", random.Random(3), 0
    while done < CORRUPTIONS:
        found = damaged(file, rng)
        if found == file:  # zeros over zeros, say
            continue
        path.write_bytes(found)
        done += 1
        with pytest.raises(FormatError):
            vq_core.load_cache(path)
    path.write_bytes(file)
    assert [content(c) for c in vq_core.load_cache(path)] == [content(c) for c in caches()]


def test_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(4)
    for n in (*range(20), 100, 10_000):
        (tmp_path / "noise").write_bytes(rng.randbytes(n))
        with pytest.raises(FormatError):
            vq_core.load_cache(tmp_path / "noise")


# ---- made up, with right hashes

VALUES: list[Any] = [
    -1, 0, 1, 2, 7, 31, 33, 2**31 - 1, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0, 1e300, True, False, None, "", "x",
    "KVCache", "PackedKVCache", "BatchKVCache", "kivi:bits=4", "kivi:bits=0", "centred", "float16", "U8", "F32", [],
    [0], [[]], [[0]], [1, 2, 3], [-1], [True], [None], {}, {"array": "0"}, {"array": "0.window.keys"}, {"a": 1},
    "9" * 300,
]  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every node of a JSON value."""
    yield way
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*way, key))


def edited(content: Any, rng: random.Random) -> Any:
    """A copy with one to three nodes replaced, taken out, doubled or exchanged."""
    made = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        ways = [way for way in places(made) if way]
        way, other = rng.choice(ways), rng.choice(ways)
        holder = made
        for key in way[:-1]:
            holder = holder[key]
        kind, value = rng.randrange(6), holder[way[-1]]
        if kind == 0:
            del holder[way[-1]]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(way[-1], copy.deepcopy(value))
        elif kind == 2 and isinstance(value, int) and not isinstance(value, bool):
            holder[way[-1]] = value + rng.choice((-32, -1, 1, 32, 128))
        elif kind == 3:
            found = made
            for key in other:
                found = found[key]
            holder[way[-1]] = copy.deepcopy(found)
        else:
            holder[way[-1]] = copy.deepcopy(rng.choice(VALUES))
    return made


def sealed(head: dict[str, Any], description: Any, data: bytes) -> bytes:
    """A file with right hashes."""
    zero = "0" * 64
    about = head["__metadata__"] | {"description": json.dumps(description), "header_sha256": zero}
    about["data_sha256"] = hashlib.sha256(data).hexdigest()
    text = json.dumps(head | {"__metadata__": about}).encode()
    raw = struct.pack("<Q", len(text)) + text
    return raw.replace(zero.encode(), hashlib.sha256(raw).hexdigest().encode()) + data


def opened(file: bytes) -> tuple[dict[str, Any], Any, bytes]:
    (size,) = struct.unpack("<Q", file[:8])
    head = json.loads(file[8 : 8 + size])
    return head, json.loads(head["__metadata__"]["description"]), file[8 + size :]


def used(cache: Any) -> None:
    """Go on with a cache as a model would."""
    if isinstance(cache, native.CacheList):
        for child in cache.caches:
            used(child)
    elif isinstance(cache, native.ArraysCache):
        mx.eval([a for a in cache.cache if a is not None], cache.make_mask(3))
    else:
        kv = cache._history.window if isinstance(cache, PackedKVCache) and cache._history else cache
        keys, values = getattr(kv, "keys", None), getattr(kv, "values", None)
        if isinstance(keys, tuple):
            keys, values = (mx.dequantize(*x, group_size=cache.group_size, bits=cache.bits) for x in (keys, values))
        shapes = [(1, 2, 32) if x is None else (*x.shape[:2], x.shape[3]) for x in (keys, values)]
        dtype = mx.float32 if keys is None else keys.dtype
        for n in (1, 40):
            mx.eval(cache.update_and_fetch(*(mx.ones((b, h, n, d), dtype) for b, h, d in shapes)))
        if isinstance(cache, PackedKVCache):
            b, h, d = shapes[0]
            mx.eval(cache.attend(mx.ones((b, h, 1, d), dtype), scale=1.0), cache.report().bytes.fp16)
            cache.trim(30)


def test_a_sealed_copy_is_read(file: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(sealed(*opened(file)))
    found = vq_core.load_cache(tmp_path / "a")
    assert [content(c) for c in found] == [content(c) for c in caches()]
    for cache in found:
        used(cache)


@pytest.mark.parametrize("part", ("description", "tensors"))
def test_hundreds_of_made_up_headers(file: bytes, tmp_path: Path, part: str) -> None:
    """The hashes are right, so all that stands between the file and the caches are the checks behind them."""
    head, description, data = opened(file)
    table = {name: entry for name, entry in head.items() if name != "__metadata__"}
    path, rng, kinds = tmp_path / "cache.vq", random.Random(5), {"refused": 0, "used": 0}
    for _ in range(EDITS):
        if part == "description":
            path.write_bytes(sealed(head, edited(description, rng), data))
        else:
            about = {"__metadata__": head["__metadata__"]}
            path.write_bytes(sealed(about | edited(table, rng), description, data))
        try:
            found = vq_core.load_cache(path)
        except VQError:
            kinds["refused"] += 1
        else:
            kinds["used"] += 1
            for cache in found:
                used(cache)
    assert kinds["refused"] > EDITS // 2 and (kinds["used"] or part == "tensors"), kinds


def test_hundreds_of_made_up_states(tmp_path: Path) -> None:
    """What mlx-lm's load_prompt_cache hands us is no better known than a file."""
    rng, kinds = random.Random(6), {"refused": 0, "used": 0}
    ours = [c for c in caches() if isinstance(c, PackedKVCache)] + [caches()[3].caches[1]]
    for cache in ours:
        text, *arrays = cache.state
        for _ in range(EDITS // len(ours)):
            leaves: list[Any] = [json.dumps(edited(json.loads(text), rng)), *arrays]
            if arrays and rng.random() < 0.3:
                place = rng.randrange(1, len(leaves))
                was = arrays[place - 1]
                wrong = [arrays[0], mx.zeros(()), mx.zeros((1, 2, 0, 32)), was[:, :1], was.astype(mx.int32)]
                leaves[place] = rng.choice([*wrong, None, 5, "text", [was], {"0": was}])
            try:
                found = PackedKVCache.from_state(leaves)
            except VQError:
                kinds["refused"] += 1
            else:
                kinds["used"] += 1
                used(found)
    assert kinds["refused"] > EDITS // 2 and kinds["used"], kinds


@pytest.mark.parametrize("state", ([], None, 5, "text", {}, {"0": "text"}, [[]], [None], [5], ["[]"], ["5"], ["NaN"],
                                   ["[" * 100_000], ["9" * 5000], ['{"vq": true}'], ['{"vq": 2.0}'],
                                   ['{"vq": 2, "vq": 2}'], ["{}", mx.zeros(3)]))  # fmt: skip
def test_states_that_are_none(state: Any) -> None:
    with pytest.raises(FormatError):
        PackedKVCache.from_state(state)


def test_a_made_up_file_of_mlx_lm_s(tmp_path: Path) -> None:
    """The way of a hostile state through mlx-lm's own function."""
    path = str(tmp_path / "cache.safetensors")
    cache = filled(PackedKVCache(method="kivi:bits=4", residual=8), 60)
    text, *arrays = cache.state

    made = type("PackedKVCache", (), {"state": [text.replace('"tokens": [32]', '"tokens": [1000000000]'), *arrays]})
    native.save_prompt_cache(path, [made()])
    with pytest.raises(FormatError, match="1000000000"):
        native.load_prompt_cache(path)


Change = Callable[[dict[str, Any]], Any]
CHANGES: dict[str, tuple[Change, str]] = {
    "heads without end": (lambda d: d["shape"].update(kv_heads=2**31 - 1), "number of heads must be a whole number"),
    "heads": (lambda d: d["shape"].update(kv_heads=2**12), "second axis must be the 4096 heads"),
    "a head size without end": (lambda d: d["shape"].update(key_dim=2**30), "key_dim must be a whole number from 1 to"),
    "a head size": (lambda d: d["shape"].update(key_dim=4096), "window.keys is"),
    "rows": (lambda d: d["shape"].update(rows=2**31 - 1), "must be a list of 2147483647 numbers"),
    "no rows": (lambda d: d["shape"].update(rows=0), "rows must be a whole number from 1"),
    "tokens": (lambda d: d["stores"]["keys"].update(tokens=[2**31 - 32]), "do not fit pages"),
    "a page that is not there": (lambda d: d["stores"]["keys"].update(owned=[[7]]), "do not fit pages"),
    "a page twice": (lambda d: d["stores"]["values"].update(owned=[[0, 0]]), "do not fit pages"),
    "no sink tokens": (lambda d: d["window"].update(sinks=[0]), r"packed tokens have \[2\]"),
    "more in the window": (lambda d: d["window"].update(counts=[2000]), "must hold"),
    "approximate": (lambda d: d["window"].update(approximate=[2000]), "2000 approximate tokens in a window of"),
    "a bool": (lambda d: d["window"].update(counts=[True]), "must be a whole number"),
    "layer": (lambda d: d.update(layer=True), "layer's index must be a whole number"),
    "rope": (lambda d: d.update(rope={"kind": "half", "base": 1e40, "dims": 4}), "rope must have"),
    "model": (lambda d: d.update(model=["x"]), "model's name must be text"),
    "policy": (lambda d: d["policy"].update(extra=1), "the policy has 'extra', which nobody knows"),
    "an array twice": (lambda d: d["arrays"].append(d["arrays"][0]), "arrays"),
    "residual": (lambda d: d["policy"].update(residual=10**30), "residual must be a whole number"),
    "dtype": (lambda d: d["shape"].update(dtype="__dict__"), "a cache holds float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_claims_of_a_state(name: str) -> None:
    cache = filled(PackedKVCache(method="kivi:bits=4", residual=8, sink_tokens=2), 60)
    text, *arrays = cache.state
    description = json.loads(text)
    change, said = CHANGES[name]
    change(description)
    before = content(cache)
    with pytest.raises(FormatError, match=said):
        cache.state = [json.dumps(description), *arrays]
    assert content(cache) == before


def test_a_window_without_bytes_claims_no_memory() -> None:
    """Sizes that no byte stands for are bounded before a method is bound to them."""
    cache = filled(PackedKVCache(method="kivi:bits=4", residual=0), 128)
    text, *arrays = cache.state
    description = json.loads(text)
    assert arrays[0].shape[2] == 0
    description["shape"].update(key_dim=2**20, value_dim=2**20)
    arrays[:2] = [mx.zeros((1, 2, 0, 2**20))] * 2
    with pytest.raises(FormatError, match=f"from 1 to {state_checks.LARGEST_HEAD}"):
        PackedKVCache.from_state([json.dumps(description), *arrays])


def test_a_claim_of_terabytes(file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, description, data = opened(file)
    name = next(n for n in head if n != "__metadata__")
    head[name] = {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}
    (tmp_path / "a").write_bytes(sealed(head, description, data))
    monkeypatch.setattr(tensors.np, "empty", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(FormatError):
        vq_core.load_cache(tmp_path / "a")


def test_lists_within_lists_without_end(tmp_path: Path) -> None:
    cache: Any = native.KVCache()
    for _ in range(saved.DEEPEST + 1):
        cache = native.CacheList(cache)
    with pytest.raises(vq_core.SettingsError, match="CacheList"):
        vq_core.save_cache(tmp_path / "a", [cache])
    vq_core.save_cache(tmp_path / "a", [cache.caches[0]])
    assert content(vq_core.load_cache(tmp_path / "a")[0]) == content(cache.caches[0])


def test_a_long_fingerprint_is_not_repeated_in_full() -> None:
    from vq_core.hosts.mlx_lm.fingerprint import differences, fingerprint

    from .models import build

    now = fingerprint(build("llama"))
    (said,) = differences(now | {"class": "x" * 10**6}, now)
    assert "saved with another model: class 'xxx" in said and len(said) < 400
