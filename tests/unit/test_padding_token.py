"""The token that padding rows are made of."""

from dataclasses import dataclass

import pytest

from raggedright import ConfigError
from raggedright.tensors.padding import padding_token_id


@dataclass
class Tokens:
    """A tokenizer, as far as padding goes."""

    eos_token_id: int | list[int] | None


@pytest.mark.parametrize(("eos", "given", "token_id"), [(2, None, 2), ([7, 8], None, 7), (2, 5, 5), (None, 0, 0)])
def test_the_padding_token_is_the_one_given_or_the_first_eos(eos, given, token_id):
    assert padding_token_id(Tokens(eos), given) == token_id


@pytest.mark.parametrize("tokenizer", [Tokens(None), Tokens([]), object()])
def test_a_tokenizer_without_eos_needs_one_or_the_setting(tokenizer):
    with pytest.raises(ConfigError, match="give the tokenizer an eos_token, or padding_token_id any id"):
        padding_token_id(tokenizer)


def test_a_negative_padding_token_is_refused():
    with pytest.raises(ConfigError, match="padding_token_id is -1"):
        padding_token_id(Tokens(2), -1)
