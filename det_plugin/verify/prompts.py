"""Prompts as token ids, cut from ordinary English text with a seeded random generator."""

from __future__ import annotations

import random

from det_plugin.verify.client import CompletionClient, ServerFailureError

CORPUS = """The lighthouse keeper counted the waves until the fog swallowed the last of them. A committee
of engineers spent the winter arguing about the width of a bridge that nobody had agreed to build. To make
good bread you need flour, water, salt, and more patience than most recipes admit. The train from the
coast arrived eleven minutes late, carrying a violin, two senators, and a crate of oranges. In the third
chapter the author claims that maps are a kind of promise; in the fourth she breaks it. Water expands when
it freezes, which is why the pipes in the old school burst every January. My grandmother kept a list of
words she considered rude, and read it aloud whenever guests stayed too long. The function returns a
sorted copy of the list and leaves the original untouched. Astronomers measured the light of the star for
nine years before they noticed that it blinked. The capital of the province has a cathedral, a glass
factory, and an excellent library of weather records. If x is larger than twelve, then the sum of its
digits must be checked again before the result is stored. She wrote to the minister about the bees, and
the minister, who liked honey, wrote back. A market is a conversation in which everyone talks about prices
and means something else. The doctor asked three questions, nodded at the second answer, and prescribed a
walk by the river. Nothing in the contract said the tenant could not keep a goat. During the eclipse the
birds went quiet and the dogs, for once, did not know what to say. The first computers filled a room; the
second ones filled a form. He remembered the recipe as two cups of rice, a handful of raisins, and an
apology. Scientists drilled through three kilometres of ice to read the air of an older planet. The city
council voted to rename the square after a poet who had never visited it. Copper carries heat well, which
makes it good for pots and bad for handles. When the orchestra tuned, the children in the back row tuned
with it, roughly. An index makes a book twice as useful and half as surprising. The river changed its
course in the flood of that spring, and the border between the two villages changed with it. Each morning
the baker, the postman and the fox walked down the same street in the same order. The experiment failed in
an interesting way, so they repeated it until it failed in a boring one. Please describe the steps needed
to repair a bicycle tyre, beginning with the tools. Write a short story about a clock that is always right
except on Tuesdays. What would happen to the tides if the moon were half as far away? Explain why leaves
change colour in autumn to someone who has never seen a tree. List five reasons for keeping a diary and
one against it."""
"""Source of every prompt; its own words only, so that nothing depends on a data set."""


class Prompts:
    """Prompts of any length from the server's own tokenization of :data:`CORPUS`.

    Args:
        special: token ids the tokenizer puts in front of a text (often one, the beginning-of-text token).
        pool: token ids of the corpus.
    """

    def __init__(self, special: list[int], pool: list[int]) -> None:
        self.special = special
        self.pool = pool

    @classmethod
    async def create(cls, client: CompletionClient) -> Prompts:
        """Have the server tokenize the corpus.

        Raises:
            ServerFailureError: the server read fewer than 16 tokens.
        """
        pool = await client.tokenize(CORPUS.replace("\n", " "), special=False)
        with_special = await client.tokenize("The", special=True)
        plain = await client.tokenize("The", special=False)
        special = with_special[: len(with_special) - len(plain)]
        if len(pool) < 16:
            raise ServerFailureError(f"server at {client.base_url} read only {len(pool)} tokens of a text of 700 words")
        return cls(special, pool)

    def take(self, rng: random.Random, length: int) -> list[int]:
        """``length`` token ids of running text, without special tokens."""
        ids: list[int] = []
        while len(ids) < length:
            span = min(length - len(ids), rng.randint(24, 96))
            start = rng.randrange(max(1, len(self.pool) - span))
            ids += self.pool[start : start + span]
        return ids[:length]

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        """A prompt of exactly ``length`` token ids, special tokens first."""
        head = self.special[:length]
        return head + self.take(rng, length - len(head))
