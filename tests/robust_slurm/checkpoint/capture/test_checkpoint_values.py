"""Values of a snapshot: what is decoded from JSON is exactly what was encoded."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.checkpoint.capture.values import TensorRef, decode, encode, encode_ref, ref_of


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


def through_json(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def save(path: str, tensor: torch.Tensor) -> Any:
        kept[path] = tensor.clone()
        return encode_ref(TensorRef(path))

    encoded = json.loads(json.dumps(encode(value, "v", save)))
    return decode(encoded, lambda ref: kept[ref.fqn])


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, to the bit, also in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, numpy.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and not isinstance(a, numpy.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, numpy.ndarray | numpy.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


NAN = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf4\xff")[0]  # negative, with a payload
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.just(NAN)
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=20)
)
keys = scalars.filter(lambda value: value == value)  # one that is no number equals nothing
hashables = st.recursive(keys, lambda s: st.tuples(s) | st.frozensets(s, max_size=3), max_leaves=4)
trees = st.recursive(
    scalars,
    lambda s: st.lists(s, max_size=4)
    | st.tuples(s, s)
    | st.dictionaries(st.text(), s, max_size=4)
    | st.dictionaries(hashables, s, max_size=4)
    | st.dictionaries(st.text(), s, max_size=3).map(OrderedDict)
    | st.lists(s, max_size=3).map(lambda v: deque(v, maxlen=5)),
    max_leaves=20,
)


@given(trees)
def test_a_tree_comes_back_with_its_types_and_bits(tree: Any) -> None:
    assert same(through_json(tree), tree)


@given(st.sets(hashables, max_size=5))
def test_sets_come_back(found: set[Any]) -> None:
    assert through_json(found) == found
    assert type(through_json(frozenset(found))) is frozenset


@pytest.mark.parametrize(
    "value",
    [
        NAN,
        -0.0,
        math.inf,
        -math.inf,
        5e-324,
        1 << 63,
        -(1 << 64),
        10**5000,
        True,
        "\ud800 alone",
        b"",
        bytes(range(256)) * 40,
        bytearray(b"ab"),
        [1] * 5000,
        tuple(range(-3000, 3000)),
        [NAN, 1.5, -0.0] * 1000,
        [1, 2.0] * 600,
        [True] * 600,
        [1 << 64] * 600,
        range(3, 30, 2),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        Counter({3: 1, 5: 2}),
        defaultdict(list, {1: [2]}),
        defaultdict(None, {"a": 1}),
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, 2], maxlen=2),
        Colour.RED,
        Level.LOW,
        {1: "int", "1": "str", (1,): "tuple", None: 0, False: 2},
        {"T": "no reference", "t": [1]},
        numpy.float32(0.1),
        numpy.float64(math.nan),
        numpy.bool_(True),
        numpy.int8(-3),
        numpy.str_("x"),
        numpy.str_(""),
        numpy.bytes_(b"x\0y"),
        numpy.datetime64("2024-01-01"),
        numpy.arange(12, dtype=numpy.uint16).reshape(3, 4).T,
        numpy.zeros((0, 3)),
        numpy.array(2.5, dtype=numpy.float16),
        numpy.random.default_rng(1).standard_normal((40, 40)),
        numpy.arange(3, dtype=">i4"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_comes_back(value: Any) -> None:
    back = through_json(value)
    assert same(back, value)
    if isinstance(value, defaultdict):
        assert back.default_factory is value.default_factory
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen


def test_arrays_that_come_back_can_be_written() -> None:
    back = through_json(numpy.zeros(3))
    back += 1
    assert back.sum() == 3


def test_what_is_large_goes_to_tensors_not_to_json() -> None:
    paths: list[str] = []

    def save(path: str, tensor: torch.Tensor) -> Any:
        paths.append(path)
        return encode_ref(TensorRef(path))

    state = {"order": list(range(10**5)), "raw": b"x" * 10**5, "a": numpy.zeros(10**4)}
    assert len(json.dumps(encode(state, "loader", save))) < 500
    assert paths == ["loader.order", "loader.raw", "loader.a"]


def test_tensors_are_the_callers() -> None:
    kept = torch.arange(3)
    assert through_json({"a": [kept]})["a"][0].equal(kept)


@given(
    st.builds(
        TensorRef,
        st.text(),
        st.sampled_from(["", "complex128"]),
        st.sampled_from(["", "cuda"]),
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
        st.lists(st.sampled_from(["R", "S0", "SS0/2"]), max_size=3).map(tuple),
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    )
)
def test_a_reference_says_all_that_it_was_told(ref: TensorRef) -> None:
    assert ref_of(json.loads(json.dumps(encode_ref(ref)))) == ref


Pair = namedtuple("Pair", "a b")
loop: list[Any] = []
loop.append(loop)


class Mine(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, {"fn": len}]}, "extra.x.a.1.fn"),
        ({"a": Pair(1, 2)}, "extra.x.a"),
        ([Mine(a=1)], "extra.x.0"),
        ({"d": defaultdict(lambda: 3)}, "extra.x.d"),
        ({"o": numpy.array([None])}, "extra.x.o"),
        ({"loop": loop}, "contains itself"),
        ({object: 1}, "extra.x.<key"),
    ],
    ids=["function", "namedtuple", "subclass", "factory", "objects", "loop", "key"],
)
def test_what_cannot_be_kept_is_refused_by_path(value: Any, path: str) -> None:
    with pytest.raises(TypeError, match=r"extra\.x.*") as refused:
        encode(value, "extra.x", lambda path, tensor: None)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    "encoded",
    [
        {"new": 1},
        {},
        {"t": 1},
        {"i": "zz"},
        {"f": "00"},
        {"b": "!"},
        {"nd": ["|O", [1], ""]},
        {"nd": ["<f8", [1000000], ""]},
        {"enum": ["os", "system", "RED"]},
        {"enum": ["no_such_module", "A", "B"]},
        {"enum": [__name__, "Colour", "GREEN"]},
        {"dtype": "Tensor"},
        {"device": "nonsense"},
        {"dd": ["eval", []]},
        {"T": {"fqn": 1}},
        {"T": ["a", {"what": 1}]},
        [[{"m": [[1]]}]],
    ],
    ids=str,
)
def test_what_is_no_value_is_an_error(encoded: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(encoded, lambda ref: None)
