"""A kernel: one text, three machines.

A body in the dialect of docs/kernels/dialect.md runs on Apple GPUs (``mx.fast.metal_kernel``), on NVIDIA GPUs
(``mx.fast.cuda_kernel``) and in the simulator on any CPU.  What MLX gets wrong or leaves to the caller is handled here,
once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import mlx.core as mx

from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels.rules import (
    BACKENDS,
    DTYPES,
    MOST_GRID,
    MOST_LAUNCHES,
    MOST_THREADS,
    NUMBERS,
    SIMD,
    TINY,
    Backend,
    Kind,
    Shape,
    kind,
    listed,
    wrong,
)


@attrs.frozen
class Call:
    """What grids and output shapes are functions of.

    Attributes:
        shapes: Of each input, at run time.
        parameters: Compile-time parameters; a dtype by its name.
        numbers: Run-time numbers.
    """

    shapes: Mapping[str, Shape]
    parameters: Mapping[str, Any]
    numbers: Mapping[str, int]


@attrs.frozen
class Output:
    """An output.

    Attributes:
        dtype: Its name, or the name of a dtype parameter.
        shape: From the call.
    """

    dtype: str
    shape: Callable[[Call], Shape]


@attrs.frozen(eq=False)
class Case:
    """One input on which a kernel must equal its reference.

    Attributes:
        inputs: One array an input.
        parameters: Compile-time parameters that the inputs do not tell, and run-time numbers.
        name: For messages.
    """

    inputs: tuple[mx.array, ...]
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    name: str = ""


@attrs.frozen(eq=False)
class Kernel:
    """One kernel.  Made once, at module level: what is compiled is kept as long as it lives.

    Attributes:
        name: Letters, digits and underscores.
        body: In the dialect.
        inputs: Dtype of each, or the name of a dtype parameter.
        outputs: In order.
        parameters: Accepted values of each compile-time parameter. A dtype parameter's are names of dtypes. Their
            product, the number of variants, is at most 24; a length that grows is no parameter.
        numbers: Run-time numbers that shapes do not tell, such as a group size: whole, below 2**32, known to the body
            by their names as ``uint``.
        threads: Threads of a threadgroup, whole SIMD groups.
        threadgroups: How many, for a call; the body guards the writes of surplus threads.
        equals: The plain MLX reference: the same arrays and parameters, the same outputs.
        cases: Inputs that show it.
        exact: Whether outputs agree bit for bit; else within ``tolerance`` of the largest magnitude.
        tolerance: See ``exact``.
        fixed: Compile-time numbers that are sizes of the model, such as a head size: they equal a length of an array
            and do not grow, see :func:`~vq_core.kernels.growth.grows`.
        check: Says why a call is not accepted, before anything is launched; nothing if it is.
        header: Helper functions.
        stands_for: The operation, such as ``"encode+pack"``.
        compared: What of the outputs is compared with the reference, where their parts are not determined.
        backends: Where it runs. Matrix products and asynchronous copies are CUDA's and the simulator's alone.
        dynamic_bytes: Of threadgroup memory that the body names with ``VQ_DYNAMIC``; CUDA and the simulator alone.
    """

    name: str
    body: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, Output]
    threads: Callable[[Call], tuple[int, int, int]]
    threadgroups: Callable[[Call], tuple[int, int, int]]
    equals: Callable[..., Sequence[mx.array]]
    cases: Callable[[], Iterable[Case]]
    parameters: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    numbers: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    exact: bool = True
    tolerance: float = 0.0
    check: Callable[[Call], str] = attrs.field(default=lambda call: "")
    header: str = ""
    stands_for: str = ""
    compared: Callable[..., Sequence[mx.array]] | None = None
    backends: tuple[Backend, ...] = BACKENDS
    dynamic_bytes: int = 0
    _launches: dict[Any, Launch] = attrs.field(init=False, factory=dict, repr=False)
    """Checked calls by shapes, dtypes and parameters: checking costs more than launching."""

    def __attrs_post_init__(self) -> None:
        if reason := wrong(self):
            raise PluginError(f"kernel {self.name!r}: {reason}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        return self

    @property
    def kinds(self) -> dict[str, Kind]:
        """Kind of each compile-time parameter."""
        return {name: kind(values) for name, values in self.parameters.items()}

    @property
    def variants(self) -> list[dict[str, Any]]:
        """Every accepted choice of the compile-time parameters."""
        return [dict(zip(self.parameters, v, strict=True)) for v in itertools.product(*self.parameters.values())]

    @property
    def arguments(self) -> dict[str, str]:
        """All inputs as the backends see them, with the run-time numbers as one more array."""
        return dict(self.inputs) | ({NUMBERS: "uint32"} if self.numbers else {})

    @property
    def text(self) -> str:
        """The body with the run-time numbers' names, on its own first line so that lines keep their numbers."""
        named = "".join(f"const uint {name} = {NUMBERS}[{i}]; " for i, name in enumerate(self.numbers))
        body = self.body.lstrip("\n")
        return f"{named}\n{body}" if body.lstrip().startswith("#") else named + body

    def __call__(self, /, *inputs: mx.array, backend: Backend | None = None, **parameters: Any) -> tuple[mx.array, ...]:
        """Run it.

        Args:
            inputs: One array an input.
            backend: By default the device's; ``"simulator"`` evaluates its inputs and runs at once.
            parameters: Compile-time parameters that the inputs' dtypes do not tell, and the run-time numbers.

        Returns:
            The outputs, lazy on a GPU.

        Raises:
            UnsupportedShapeError: a shape, dtype, parameter or device that the kernel is not for.
            KernelError: the simulator found a broken rule.
        """
        from vq_core.kernels import backends

        return self._run(backends.choose(backend), inputs, parameters)

    def run_on(self, runner: Any, /, *inputs: mx.array, **parameters: Any) -> tuple[mx.array, ...]:
        """As a call, on a :class:`~vq_core.kernels.backends.Runner` at hand, such as a simulator of another seed."""
        return self._run(runner, inputs, parameters)

    def _run(self, runner: Any, inputs: Sequence[mx.array], parameters: Mapping[str, Any]) -> tuple[mx.array, ...]:
        return self.prepared(runner, inputs, parameters)(inputs)

    def prepared(self, runner: Any, inputs: Sequence[mx.array], parameters: Mapping[str, Any]) -> Prepared:
        """A checked call for these inputs, and for any others of their shapes and dtypes.

        Raises:
            UnsupportedShapeError: as a call.
        """
        if runner.backend not in self.backends:
            raise UnsupportedShapeError(
                f"kernel {self.name} runs on {listed(self.backends)}, not on {runner.backend}; on any machine give "
                f"backend='simulator'"
            )
        key: Any = [(x.shape, x.dtype) if isinstance(x, mx.array) else x for x in inputs]
        key = (*key, *parameters.items())
        try:
            launch = self._launches.get(key)
        except TypeError:  # something that cannot be looked up is something that is refused
            launch = None
        if launch is None:
            launch = self.launch(self.resolve(inputs, parameters))
            if len(self._launches) >= MOST_LAUNCHES:
                self._launches.clear()
            self._launches[key] = launch
        return Prepared(self, runner, launch, self.number_arrays(launch.call))

    def launch(self, call: Call) -> Launch:
        """A checked call, ready to run.

        Raises:
            PluginError: a grid that no backend takes.
        """
        shapes = [tuple(output.shape(call)) for output in self.outputs.values()]
        dtypes = [self.dtype_of(output.dtype, call) for output in self.outputs.values()]
        made = Launch(call, shapes, dtypes, self.threadgroups(call), self.threads(call))
        wrong = made.wrong() if any(math.prod(shape) for shape in shapes) else ""
        if wrong:
            raise PluginError(f"kernel {self.name!r}: {wrong}")
        return made

    def arrays(self, inputs: Sequence[mx.array], call: Call) -> list[mx.array]:
        """The arrays of a checked call as the backends take them, one for each of ``arguments``."""
        return [*(x.reshape(1) if x.ndim == 0 else x for x in inputs), *self.number_arrays(call)]

    def number_arrays(self, call: Call) -> list[mx.array]:
        """The run-time numbers as the last input, where there are any."""
        return [number_array(tuple(call.numbers.values()))] if self.numbers else []

    def resolve(self, inputs: Sequence[mx.array], parameters: Mapping[str, Any]) -> Call:
        """The call that these arrays and parameters are, checked.

        Raises:
            UnsupportedShapeError: naming what is wrong and what is accepted.
        """
        if len(inputs) != len(self.inputs):
            raise UnsupportedShapeError(f"kernel {self.name} takes {', '.join(self.inputs)}: got {len(inputs)} arrays")
        found = {n: v for n, v in parameters.items() if n not in self.numbers}
        numbers = {name: parameters.get(name) for name in self.numbers}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
                raise UnsupportedShapeError(
                    f"kernel {self.name} needs {name}=, a whole number below 2**32: got {value!r}"
                )
        for (name, dtype), x in zip(self.inputs.items(), inputs, strict=True):
            if not isinstance(x, mx.array):
                raise UnsupportedShapeError(f"kernel {self.name}: {name} must be an MLX array, got {type(x).__name__}")
            has = str(x.dtype).removeprefix("mlx.core.")
            has = "bool_" if has == "bool" else has
            if dtype in self.parameters:
                if found.setdefault(dtype, has) != has:
                    raise UnsupportedShapeError(f"kernel {self.name}: {name} is {has}, {dtype} is {found[dtype]}")
            elif has != dtype:
                raise UnsupportedShapeError(f"kernel {self.name}: {name} is {has}; accepted is {dtype}")
        for name, accepted in self.parameters.items():
            if name not in found:
                raise UnsupportedShapeError(f"kernel {self.name} needs {name}=, one of {listed(accepted)}")
            # Of the same type: True is 1 and 4.0 is 4 to Python, but not to a compiler.
            if type(found[name]) is not type(accepted[0]) or found[name] not in accepted:
                raise UnsupportedShapeError(
                    f"kernel {self.name}: {name} {found[name]!r} is not accepted; accepted are {listed(accepted)}"
                )
        extra = [name for name in found if name not in self.parameters]
        if extra:
            raise UnsupportedShapeError(f"kernel {self.name} has no parameter {', '.join(extra)}")
        shapes = {name: tuple(x.shape) or (1,) for name, x in zip(self.inputs, inputs, strict=True)}
        if self._names_address_space:
            for name, x in zip(self.inputs, inputs, strict=True):
                if x.size < TINY:
                    raise UnsupportedShapeError(
                        f"kernel {self.name}: {name} {shapes[name]} has {x.size} elements; at least {TINY} are "
                        f"accepted: its text names VQ_GLOBAL, and Metal keeps smaller arrays elsewhere"
                    )
        call = Call(shapes, {name: found[name] for name in self.parameters}, numbers)  # type: ignore[arg-type]
        wrong = self.check(call)
        if wrong:
            raise UnsupportedShapeError(f"kernel {self.name}: {wrong}")
        return call

    @property
    def _names_address_space(self) -> bool:
        return "metal" in self.backends and ("VQ_GLOBAL(" in self.header or "VQ_GLOBAL(" in self.body)

    def dtype_of(self, dtype: str, call: Call) -> str:
        """A dtype's name, looked up where it is a parameter's."""
        return str(call.parameters.get(dtype, dtype))


@attrs.frozen
class Launch:
    """A checked call, ready to run."""

    call: Call
    shapes: Sequence[Shape]
    dtypes: Sequence[str]
    threadgroups: tuple[int, int, int]
    threads: tuple[int, int, int]
    prepared: dict[str, Any] = attrs.field(init=False, factory=dict, eq=False, repr=False)
    """What a backend has made of it, to be used again."""
    empty: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether no output has an element."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "empty", not any(math.prod(shape) for shape in self.shapes))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Threads, as MLX counts a grid; whole threadgroups, so that no backend rounds it."""
        x, y, z = (a * b for a, b in zip(self.threadgroups, self.threads, strict=True))
        return x, y, z

    def wrong(self) -> str:
        """What is wrong with the grid, if anything."""
        count = math.prod(self.threads)
        if count % SIMD or not 0 < count <= MOST_THREADS:
            return f"{self.threads} threads a threadgroup: their product must be a multiple of {SIMD}, at most 1024"
        if any(n < 1 for n in self.threadgroups):
            return f"{self.threadgroups} threadgroups for outputs {self.shapes}: each number must be 1 or more"
        if math.prod(self.grid) >= MOST_GRID:
            return f"{self.threadgroups} threadgroups of {self.threads}: a grid has fewer than 2**32 threads"
        return ""


@attrs.define(eq=False)
class Prepared:
    """A checked call whose inputs may change, but not their shapes and dtypes."""

    kernel: Kernel
    runner: Any
    launch: Launch
    numbers: list[mx.array]

    def __call__(self, inputs: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """Run it."""
        if self.launch.empty:
            named = zip(self.launch.shapes, self.launch.dtypes, strict=True)
            return tuple(mx.zeros(s, DTYPES[d]) for s, d in named)
        return self.at_once([x if x.ndim else x.reshape(1) for x in inputs])

    def at_once(self, inputs: list[mx.array]) -> tuple[mx.array, ...]:
        """Run it, where no input is a single number and some output has an element; the list is used up."""
        inputs += self.numbers
        found: tuple[mx.array, ...] = self.runner.run(self.kernel, inputs, self.launch)
        return found


@lru_cache(maxsize=4096)
def number_array(numbers: tuple[int, ...]) -> mx.array:
    """Kept: an array from Python costs more than a launch.  Eight at least, see docs/kernels/dialect.md."""
    made = mx.array([*numbers, *[0] * (8 - len(numbers))], mx.uint32)
    mx.eval(made)
    return made
