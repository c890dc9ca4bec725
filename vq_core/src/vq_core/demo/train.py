"""Train the demo model: a small Llama over bytes, with mlx-lm's own model class.

    python -m vq_core.demo.train --text text/[emnps]*.txt --test text/heldout.txt --out model --steps 7000

The last `--val-share` of every file is held out to choose the checkpoint; a `--test` file is only
measured. So that the model leans on its cache, many training rows repeat earlier passages of their
own verbatim, and the loss on such passages is reported apart. `--out` then loads by `mlx_lm.load`
with nothing else. `vq_core.demo.text` makes the text files.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs
from numpy.typing import NDArray

from vq_core.demo.rows import BOS, EOS, Ids, Sampler, read_ids, read_works

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,  # 256 bytes, bos, eos, and two unused rows
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 704,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float16",
}

Tree = dict[str, Any]


# Files


def tokenizer_json() -> Tree:
    """A tokenizer whose token ids are the bytes of UTF-8 (a BPE with no merges)."""
    specials = {"<|bos|>": BOS, "<|eos|>": EOS}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags, "special": True} for t, i in specials.items()],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        # mlx-lm knows this decoder, and streams it byte by byte.
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {f"<0x{b:02X}>": b for b in range(256)} | specials,
            "merges": [],
        },
    }


def write_model(out: Path, params: Tree) -> None:
    """Write fp16 weights, configuration and tokenizer as `mlx_lm.load` reads them."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    weights = {name: w.astype(mx.float16) for name, w in flat(params).items()}
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})


# Model


def new_model() -> Model:
    """mlx-lm's model at random."""
    return Model(ModelArgs.from_dict(CONFIG))  # type: ignore[no-untyped-call]


def forward(model: Model, ids: mx.array, dtype: mx.Dtype, dropout: float = 0.0) -> mx.array:
    """The logits of mlx-lm's model, with dropout before each addition to the residual stream.

    The embedding is a product with one-hot rows: its gradient is then a product, not a scatter.
    """

    def drop(x: mx.array) -> mx.array:
        if not dropout:
            return x
        keep = mx.random.bernoulli(1 - dropout, x.shape)
        return mx.where(keep, x * (1 / (1 - dropout)), mx.zeros_like(x))

    embedding = model.model.embed_tokens.weight
    one_hot = (ids[..., None] == mx.arange(embedding.shape[0])).astype(dtype)
    h = drop(one_hot @ embedding)
    for layer in model.layers:
        h = h + drop(layer.self_attn(layer.input_layernorm(h), "causal"))
        h = h + drop(layer.mlp(layer.post_attention_layernorm(h)))
    logits: mx.array = model.model.embed_tokens.as_linear(model.model.norm(h))
    return logits.astype(mx.float32)


def flat(params: Tree) -> dict[str, mx.array]:
    """Parameters by their dotted names."""
    return dict(cast(Any, tree_flatten(params)))


def as_type(params: Tree, dtype: mx.Dtype) -> Tree:
    """The same parameters in another type."""
    out: Tree = tree_map(lambda p: p.astype(dtype), params)
    return out


class Trainer:
    """Keeps float32 parameters and AdamW's state; computes in `dtype`."""

    def __init__(self, dtype: mx.Dtype, dropout: float, decay: float) -> None:
        """Make a model at random and compile its step."""
        self.dtype = dtype
        self.model = new_model()
        self._compute = new_model()
        self._scale_init()
        adam = partial(optim.AdamW, 0.0, betas=[0.9, 0.95], bias_correction=True)
        self.optimizer = optim.MultiOptimizer(
            [adam(weight_decay=decay), adam(weight_decay=0.0)], [lambda _, w: w.ndim > 1]
        )
        self.optimizer.init(self.model.trainable_parameters())
        self.state = [self.model.state, self.optimizer.state, mx.random.state]
        mx.eval(self.state)

        def loss(params: Tree, rows: mx.array) -> mx.array:
            self._compute.update(as_type(params, dtype))
            logits = forward(self._compute, rows[:, :-1], dtype, dropout)
            return nn.losses.cross_entropy(logits, rows[:, 1:], reduction="mean")

        def step(rows: mx.array) -> mx.array:
            params = self.model.trainable_parameters()
            value, grads = mx.value_and_grad(loss)(params, rows)
            grads, _ = optim.clip_grad_norm(grads, 1.0)  # type: ignore[no-untyped-call]
            self.optimizer.update(self.model, grads)
            return value

        def losses(params: Tree, rows: mx.array) -> mx.array:
            self._compute.update(as_type(params, dtype))
            logits = forward(self._compute, rows[:, :-1], dtype)
            return nn.losses.cross_entropy(logits, rows[:, 1:])

        self.step = mx.compile(step, inputs=self.state, outputs=self.state)
        self._losses = mx.compile(losses)

    def _scale_init(self) -> None:
        """Normal weights of deviation 0.02, smaller where a layer adds to the residual stream."""
        layers = CONFIG["num_hidden_layers"]

        def init(path: str, w: mx.array) -> mx.array:
            if w.ndim < 2:
                return mx.ones_like(w)
            adds = path.endswith(("o_proj.weight", "down_proj.weight"))
            return mx.random.normal(w.shape) * (0.02 / math.sqrt(2 * layers) if adds else 0.02)

        params = flat(self.model.trainable_parameters())
        self.model.load_weights([(path, init(path, w)) for path, w in params.items()])

    def losses(self, rows: Ids, at_once: int = 16) -> NDArray[np.float32]:
        """The loss of every target in `rows`."""
        params = self.model.trainable_parameters()
        parts = [np.array(self._losses(params, mx.array(rows[i : i + at_once]))) for i in range(0, len(rows), at_once)]
        return np.concatenate(parts)


# Measuring


@dataclass
class Probe:
    """Fixed rows of held-out text: as it is, and with repeated passages."""

    plain: Ids
    repeated: Ids
    inside: NDArray[np.bool_]
    settled: NDArray[np.bool_]

    @classmethod
    def make(cls, ids: Ids, length: int, seed: int = 1234) -> Probe:
        """Cut `ids` into rows, and make as many with one repetition each."""
        count = (len(ids) - 1) // length
        plain = np.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)])
        sampler = Sampler(ids, np.random.default_rng(seed))
        pairs = [sampler.repeated(row) for row in plain]
        inside = np.zeros((count, length), np.bool_)
        settled = np.zeros((count, length), np.bool_)
        for i, (_, where) in enumerate(pairs):
            inside[i, where.start - 1 : where.stop - 1] = True
            settled[i, where.start + 31 : where.stop - 1] = True
        return cls(plain, np.stack([row for row, _ in pairs]), inside, settled)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Nats a byte: plain text, repeated passages, the same after their first 32 bytes."""
        losses = trainer.losses(self.repeated)
        return {
            "plain": float(trainer.losses(self.plain).mean()),
            "repeated": float(losses[self.inside].mean()),
            "repeated_after_32": float(losses[self.settled].mean()),
        }


def report(name: str, values: dict[str, float]) -> str:
    """One line of measurements."""
    figures = "  ".join(f"{k} {v:.4f}" for k, v in values.items())
    return f"{name}: {figures} nats/byte ({values['plain'] / math.log(2):.3f} bits/byte)"


# Training


def learning_rate(progress: float, step: int, peak: float, warmup: int) -> float:
    """Linear warm-up over steps, then a cosine over the run down to 2 % of the peak."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / warmup) * cosine


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, keep the best checkpoint by validation loss, and return the run's record."""
    mx.random.seed(args.seed)
    train_ids, val_ids = read_works(args.text, args.val_share)
    trainer = Trainer(getattr(mx, args.dtype), args.dropout, args.weight_decay)
    if args.start:
        weights = cast(dict[str, mx.array], mx.load(str(args.start / "model.safetensors")))
        trainer.model.load_weights([(name, w.astype(mx.float32)) for name, w in weights.items()])
    rng = np.random.default_rng(args.seed)
    sampler = Sampler(train_ids, rng, repeat=args.repeat)
    probe = Probe.make(val_ids, args.length)
    size = sum(w.size for w in flat(trainer.model.trainable_parameters()).values())
    print(f"{size:,} parameters, {len(train_ids):,} training and {len(val_ids):,} held-out bytes")

    history: list[dict[str, float]] = []
    best: Tree = {}
    best_loss = math.inf
    steps = tokens = 0
    running: list[mx.array] = []
    start = time.monotonic()
    progress = 0.0
    while progress < 1.0:
        length = args.length * (2 if rng.random() < args.long_share else 1)
        sampler.drill = args.drill * max(0.0, 1 - progress / args.drill_until)
        rows = sampler.batch(args.batch * args.length // length, length)
        trainer.optimizer.learning_rate = learning_rate(progress, steps, args.learning_rate, args.warmup)
        running.append(trainer.step(mx.array(rows)))
        mx.async_eval(trainer.state, running[-1])  # type: ignore[no-untyped-call]
        if len(running) > 1:
            mx.eval(running[-2])  # at most one step is waiting
        if steps == 0:  # compiling the step may take a minute: not counted
            mx.eval(running[-1])
            start = time.monotonic()
        steps += 1
        tokens += rows.shape[0] * length
        elapsed = (time.monotonic() - start) / 60
        progress = steps / args.steps if args.steps else elapsed / args.minutes
        if steps % args.eval_every == 0 or progress >= 1.0:
            loss = float(mx.mean(mx.stack(running)))
            running = []
            values = probe.measure(trainer)
            history.append({"step": steps, "tokens": tokens, "train": loss, **values})
            print(
                f"{elapsed:6.2f} min  step {steps:6}  {tokens / 1e6:7.1f} M bytes  "
                f"train {loss:.4f}  {report('val', values)}",
                flush=True,
            )
            if not math.isfinite(values["plain"]):
                raise RuntimeError("the loss is no longer finite")
            if values["plain"] < best_loss:
                best_loss = values["plain"]
                best = tree_map(lambda p: p + 0, trainer.model.trainable_parameters())
                mx.eval(best)
                write_model(args.out, best)

    minutes = (time.monotonic() - start) / 60
    trainer.model.update(best)
    record: dict[str, Any] = {
        "arguments": {k: str(v) for k, v in vars(args).items() if k != "text"},
        "text": [path.name for path in args.text],
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "mlx": version("mlx"),
        "parameters": size,
        "minutes": round(minutes, 2),
        "steps": steps,
        "tokens": tokens,
        "best_step": min(history, key=lambda h: h["plain"])["step"],
        "val": probe.measure(trainer),
        "val_long": Probe.make(val_ids, 2 * args.length).measure(trainer),
        "history": history,
    }
    if args.test:
        record["test"] = Probe.make(read_ids(args.test), args.length).measure(trainer)
    for name in ("val", "val_long", "test"):
        if name in record:
            print(report(name, record[name]))
    print(f"{minutes:.2f} min, {steps} steps, {tokens:,} bytes; best at {record['best_step']}")
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def main(argv: list[str] | None = None) -> None:
    """Command line: see the module's description."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    add = parser.add_argument
    add("--text", type=Path, nargs="+", required=True, help="training text, one file a work")
    add("--test", type=Path, help="text that is only measured, at the end")
    add("--out", type=Path, required=True, help="folder for the model")
    add("--start", type=Path, help="folder of a model to go on from: a second stage, with few drills")
    add("--minutes", type=float, default=5.0, help="length of the run by the clock")
    add("--steps", type=int, default=0, help="length of the run in steps, instead of --minutes")
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=32, help="rows a step (half as many of the longer)")
    add("--length", type=int, default=2048, help="bytes a row")
    add("--long-share", type=float, default=0.25, help="share of steps on rows twice as long")
    add("--repeat", type=float, default=0.3, help="share of rows that repeat a passage")
    add("--drill", type=float, default=0.9, help="share of rows of repetitions only, at the start")
    add("--drill-until", type=float, default=0.8, help="share of the run after which it is zero")
    add("--dropout", type=float, default=0.0)
    add("--weight-decay", type=float, default=0.1)
    add("--learning-rate", type=float, default=3e-3)
    add("--warmup", type=int, default=100, help="steps")
    add("--val-share", type=float, default=0.03, help="held-out end of every work")
    add("--eval-every", type=int, default=250, help="steps")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
