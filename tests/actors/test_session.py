"""What a slot's session says of itself (S5)."""

from dataclasses import replace

from regrow.actors.prepare import Preparer
from regrow.actors.session import Session
from regrow.models.constrain import Grammars
from regrow.policy.keys import Namespace
from regrow.policy.plan import ChunkTable
from regrow.policy.request import GenerateRequest
from tests.world.tokenizer import world_tokenizer


def test_s5_a_session_begins_a_prompt_up_to_where_their_keys_part_and_in_its_namespace_alone() -> None:
    prepare = Preparer(
        tokenizer=world_tokenizer(),
        table=ChunkTable.uniform(64),
        namespace=Namespace.of("test"),
        context=256,
        checkpoints=6,
        checkpoint_every=0,
        grammars=Grammars(world_tokenizer()),
    )
    held = prepare(GenerateRequest(prompt="a" * 100 + "b" * 50))
    other = prepare(GenerateRequest(prompt="a" * 100 + "c" * 50))
    session = Session()
    session.serve(0, held, ())
    session.extend(held.keys, 120, ())
    assert [session.begins(held, position) for position in (0, 64, 120, 121)] == [True, True, True, False]
    assert [session.begins(other, position) for position in (0, 100, 101)] == [True, True, False]
    elsewhere = replace(held, namespace=Namespace.of("elsewhere"))
    assert [session.begins(elsewhere, position) for position in (0, 64)] == [True, False]
