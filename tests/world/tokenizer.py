"""The shipped chat tokenizer over bytes and ChatML: real marks and real texts, and no file or model.

The fake device draws from `WORDS`: short letter groups, which no prompt holds.
"""

import functools

from regrow.models.byte_tokenizer import IM_END, byte_tokenizer
from regrow.models.tokenizer import ChatTokenizer

VOCAB = 512
EOS = IM_END
WORDS = range(259, VOCAB)


@functools.cache
def world_tokenizer() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(VOCAB, context=1 << 20))
