import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.policy.keys import Namespace, as_keys, common_prefix, prefix_hashes

ids = st.lists(st.integers(-3, 3), max_size=40)


@given(ids, ids)
def test_r3_two_prompts_share_a_prefix_iff_their_keys_do(a: list[int], b: list[int]) -> None:
    shared = common_prefix(as_keys(a), as_keys(b))
    assert a[:shared] == b[:shared]
    assert shared in (len(a), len(b)) or a[shared] != b[shared]


def test_keys_are_a_read_only_copy() -> None:
    source = np.array([1, 2, 3])
    keys = as_keys(source)
    source[0] = 9
    assert keys.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        keys[0] = 5


@given(ids, ids, st.integers(0, 40))
def test_r3_prefix_hashes_agree_iff_the_prefixes_do(a: list[int], b: list[int], position: int) -> None:
    position = min(position, len(a), len(b))
    namespace = Namespace.of("m")
    one, other = (prefix_hashes(namespace, as_keys(x), [position]) for x in (a, b))
    assert (one == other) == (a[:position] == b[:position])


@given(ids.filter(bool))
def test_a_hash_does_not_depend_on_the_positions_hashed_before_it(a: list[int]) -> None:
    namespace, keys = Namespace.of("m"), as_keys(a)
    every = prefix_hashes(namespace, keys, range(len(a) + 1))
    assert every == tuple(prefix_hashes(namespace, keys, [p])[0] for p in range(len(a) + 1))
    assert len(set(every)) == len(every)


def test_r3_two_namespaces_never_match() -> None:
    model = Namespace.of("weights", "bfloat16", ((0, 256),))
    others = [
        Namespace.of("weights", "float32", ((0, 256),)),
        Namespace.of("weights", "bfloat16", ((0, 128),)),
        model.salted("tenant a"),
        model.salted("tenant b"),
        model.salted(""),
    ]
    keys = as_keys([1, 2, 3])
    hashes = [prefix_hashes(space, keys, [3]) for space in (model, *others)]
    assert len(set(hashes)) == len(hashes)


def test_no_salt_is_the_namespace_itself() -> None:
    assert Namespace.of("m").salted(None) == Namespace.of("m")
