"""Prices: the table that comes along, and the user's own."""

from pathlib import Path

import pytest

from regrow.api.relay.prices import FILE, Prices, Tokens
from regrow.errors import BadConfig

OWN = """
[[price]]
models = ["own-*", "claude-opus-4-5*"]
input = 1.0
output = 2.0
cache_read = 0.5
"""


def test_a_model_is_found_by_the_first_pattern_that_fits() -> None:
    prices = Prices()
    found = {
        model: prices.of(model).input
        for model in (
            "claude-opus-4-5-20251101",
            "claude-opus-4-1-20250805",
            "anthropic/claude-sonnet-4.5",
            "claude-haiku-4-5-20251001",
            "gpt-5",
            "gpt-5-mini-2025-08-07",
            "gpt-4o",
        )
    }
    assert list(found.values()) == [5.0, 15.0, 3.0, 1.0, 1.25, 0.25, 2.5]
    assert prices.of("somebody-elses") is None


@pytest.mark.parametrize("model", ["claude-opus-4-5", "claude-sonnet-4-5", "claude-3-5-haiku-latest"])
def test_anthropics_cache_is_read_at_a_tenth_and_written_at_five_quarters_or_double(model: str) -> None:
    price = Prices().of(model)
    ratios = (price.cache_read, price.cache_write_5m, price.cache_write_1h)
    assert ratios == pytest.approx((price.input * 0.1, price.input * 1.25, price.input * 2))


def test_the_users_entries_come_first(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(OWN)
    prices = Prices(tmp_path)
    assert [prices.of(model).output for model in ("own-1", "claude-opus-4-5", "claude-sonnet-4-5")] == [
        2,
        2,
        15,
    ]
    assert Prices(tmp_path / "elsewhere").of("own-1") is None


@pytest.mark.parametrize(
    "text", ["[[price]", OWN + "prise = 3", OWN + 'minimum = "many"', '[[price]]\nmodels = ["x"]']
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(BadConfig, match=FILE):
        Prices(tmp_path)


def test_what_was_left_out_would_have_cost_what_most_of_the_prompt_did() -> None:
    price = Prices().of("claude-sonnet-4-5")
    for tokens, dollars in (
        (Tokens(read=900, written_5m=100), 0.3),
        (Tokens(read=100, written_5m=900), 3.75),
        (Tokens(read=100, written_1h=900), 6.0),
        (Tokens(fresh=900, read=100), 3.0),
    ):
        assert price.saved(1e6, tokens) == pytest.approx(dollars)
