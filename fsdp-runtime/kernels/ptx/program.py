"""Programs: PTX files parsed into decoded instructions, labels and parameters, and the IDs of kernels.

The test that writes the files adds two lines to the compiler's PTX: `// N bytes smem`, the bytes of dynamic shared
memory of a cube, and `// ID KernelId{..}`, the options that the kernel was compiled with.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Union

ENTRY = re.compile(
    r"\.visible\s+\.entry\s+(?P<name>\w+)\s*\((?P<parameters>.*?)\)\s*"
    r"\.reqntid\s+(?P<block>\d+\s*,\s*\d+\s*,\s*\d+)\s*\n\{(?P<body>.*?)\n\}",
    re.S,
)
PARAMETER = re.compile(r"\.param\s+(?P<type>[^,]*?)(?P<name>\w+)(?:\[(?P<size>\d+)\])?\s*(?:,|$)")
SHARED_BYTES = re.compile(r"^//\s*(\d+) bytes smem", re.M)
KERNEL_ID = re.compile(r"^// ?ID (.*)$", re.M)
REGISTERS = re.compile(r"^\.reg\s+\.(\w+)\s+(%\w+?)<\d+>;$")
LABEL = re.compile(r"^(\$\w+):$")
GUARD = re.compile(r"^@(!?)(%\w+)\s+(.*)$")
ADDRESS = re.compile(r"^\[([%\w$]+)(?:\+(-?\d+))?\]$")
# Bits of a register of each type. A predicate has one.
REGISTER_BITS = {"pred": 1, "b16": 16, "b32": 32, "f32": 32, "b64": 64, "f64": 64}
# Bytes of a parameter that is a pointer.
POINTER_BYTES = 8


class PtxError(Exception):
    """PTX that is not understood, or that cannot go on."""


@dataclass(frozen=True)
class Address:
    """An operand `[base+offset]`. The base is a register or a parameter."""

    base: str
    offset: int


# A register, a number or a name; a vector of them; or an address.
Operand = Union[str, "tuple[str, ...]", Address]


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction. With a guard, only threads whose predicate is true (or false, if negated) execute it."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None = None
    negated: bool = False


@dataclass(frozen=True)
class Parameter:
    name: str
    bytes: int


@dataclass(frozen=True)
class KernelId:
    """The options of an attention kernel. Numbers that a kernel has not are 0."""

    # Name of the kernel's function, such as `flash_forward_kernel`.
    kind: str
    # `bf16` or `f16`.
    dtype: str = "bf16"
    # Bits of sizes and strides in the last parameter.
    address_bits: int = 64
    # Warps of a cube, strips of 16 rows of a warp, and columns of a tile of scores.
    planes: int = 0
    strips: int = 0
    columns: int = 0
    # Elements of a row.
    width: int = 0
    # Whether there are keys before the first one that a query sees, and after the last one.
    bounded: tuple[bool, bool] = (False, False)
    # Whether the kernel has the buffers of a bias, of a table of seen keys, and of a dropout mask.
    bias: bool = False
    table: bool = False
    mask: bool = False
    # Whether keys and values are `[batch, rows, heads, width]` in memory.
    interleaved: bool = False
    # The means kernel's chunks of 8 elements in a row, and threads for a row.
    chunks: int = 0
    lanes: int = 0

    @property
    def rows(self) -> int:
        """Rows of the results of a cube."""
        return self.planes * self.strips * 16


@dataclass(frozen=True)
class Program:
    """The entry function of a PTX file."""

    name: str
    # Threads of a cube in the three dimensions.
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    # Bits of the registers by the begin of their names, such as 64 for `%rd`.
    register_bits: dict[str, int]
    instructions: tuple[Instruction, ...]
    # Index of the instruction after each label.
    labels: dict[str, int]
    kernel: KernelId | None = None

    @property
    def threads(self) -> int:
        """Threads of a cube."""
        return math.prod(self.block)


def parse_kernel_id(text: str) -> KernelId:
    """Parses `KernelId{type:path::name::Name,..}`. Spaces do not matter."""
    text = re.sub(r"\s", "", text)
    path = re.search(r"type:([\w:]+)", text)
    if path is None or path[1].count("::") < 1:
        raise PtxError(f"not the ID of a kernel: {text}")

    def number(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", text)
        return int(found[1]) if found else 0

    def has_buffer(name: str) -> bool:
        return re.search(rf"\b{name}:Sequence\[[^\]]", text) is not None

    address_bits = re.search(r"\baddress_type:U(\d+)", text)
    dtype = re.search(r"\bdtype:Float\((\w+)\)", text)
    bounded = re.search(r"\bbounded:\[(\w+),(\w+)\]", text)
    numbers = {name: number(name) for name in ("planes", "strips", "columns", "width", "chunks", "lanes")}
    return KernelId(
        kind=path[1].split("::")[-2],
        dtype=dtype[1].lower() if dtype else "",
        address_bits=int(address_bits[1]) if address_bits else 0,
        bounded=(bounded[1] == "true", bounded[2] == "true") if bounded else (False, False),
        interleaved="interleaved:true" in text,
        **{name: has_buffer(name) for name in ("bias", "table", "mask")},
        **numbers,
    )


def split_operands(text: str) -> list[str]:
    """Splits at the commas outside of braces and brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


def parse_operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text.strip("{}").split(","))
    if not text.startswith("["):
        return text
    found = ADDRESS.match(text)
    if found is None:
        raise PtxError(f"not an address: {text}")
    return Address(found[1], int(found[2] or 0))


def parse_instruction(line: int, text: str) -> Instruction:
    found = GUARD.match(text)
    rest = found[3] if found else text
    opcode, _, operands = rest.partition(" ")
    return Instruction(
        line=line,
        text=text,
        opcode=opcode,
        operands=tuple(parse_operand(operand) for operand in split_operands(operands)),
        guard=found[2] if found else None,
        negated=bool(found and found[1]),
    )


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    size = lambda found: int(found["size"]) if found["size"] else POINTER_BYTES
    lines = (line.strip() for line in text.splitlines())
    found = (PARAMETER.match(line) for line in lines if line)
    return tuple(Parameter(parameter["name"], size(parameter)) for parameter in found if parameter)


class Body:
    """Instructions, labels and registers of a function."""

    def __init__(self, text: str, first_line: int) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.register_bits: dict[str, int] = {}
        self.pending = ""
        self.pending_line = 0
        for number, line in enumerate(text.split("\n"), first_line):
            line = re.sub(r"\s+", " ", line.split("//")[0].strip())
            if line:
                self.add_line(number, line)
        if self.pending:
            raise PtxError(f"line {self.pending_line}: no end of {self.pending}")

    def add_line(self, number: int, line: str) -> None:
        if registers := REGISTERS.match(line):
            self.add_registers(number, *registers.groups())
        elif label := LABEL.match(line):
            self.labels[label[1]] = len(self.instructions)
        else:
            self.add_text(number, line)

    def add_registers(self, number: int, register_type: str, prefix: str) -> None:
        if register_type not in REGISTER_BITS:
            raise PtxError(f"line {number}: registers of an unknown type, {register_type}")
        self.register_bits[prefix] = REGISTER_BITS[register_type]

    def add_text(self, number: int, line: str) -> None:
        """Adds a line of an instruction, which may have several lines and ends with a semicolon."""
        if not self.pending:
            self.pending_line = number
        self.pending = f"{self.pending} {line}".strip()
        if self.pending.endswith(";"):
            text, self.pending = self.pending[:-1].strip(), ""
            if not text.startswith(".local"):
                self.instructions.append(parse_instruction(self.pending_line, text))


def parse_program(text: str) -> Program:
    """Parses the entry function of a PTX file."""
    entry = ENTRY.search(text)
    if entry is None:
        raise PtxError("no `.visible .entry` with `.reqntid`")
    body = Body(entry["body"], text[: entry.start("body")].count("\n") + 1)
    shared_bytes, kernel = SHARED_BYTES.search(text), KERNEL_ID.search(text)
    x, y, z = (int(number) for number in entry["block"].split(","))
    return Program(
        name=entry["name"],
        block=(x, y, z),
        shared_bytes=int(shared_bytes[1]) if shared_bytes else 0,
        parameters=parse_parameters(entry["parameters"]),
        register_bits=body.register_bits,
        instructions=tuple(body.instructions),
        labels=body.labels,
        kernel=parse_kernel_id(kernel[1]) if kernel else None,
    )


def load_program(path: Path) -> Program:
    """Parses a PTX file. An error names the file."""
    try:
        return parse_program(path.read_text())
    except PtxError as error:
        raise PtxError(f"{path.name}: {error}") from error
