"""What the contenders are given: texts to be copied, where drafts from the prompt fit, and questions, where none do."""

from collections.abc import Sequence
from typing import Any

from spec_v2.training.heldout import heldout_prompts

COPY_REQUEST = "Copy this text exactly, word for word:\n\n"

TEXTS = (
    "The museum keeps its oldest map in a drawer that is opened twice a year. It was drawn on calfskin in"
    " brown and green ink, and shows a coast that no sailor has ever found. Some scholars think it was a "
    "joke; others believe the sea has taken the land since then. In the corner sits a small red fox, "
    "holding a key. A cleaner noticed last winter that the fox also appears on a tile in the cellar, "
    "facing the other way. The director had the tile lifted. Under it lay a folded sheet of lead with "
    "nine lines of writing, and the first word of every line was the name of a wind.",
    "My grandfather repaired clocks in a narrow shop between a bank and a bakery. He never hurried. A "
    "customer who came back too early was given a chair, a cup of tea, and a lecture on patience. On the "
    "wall hung forty clocks, and no two of them agreed, because he set each one to the hour at which its "
    "owner had been born. At noon, the room sounded like rain. When he retired, the owners came to "
    "collect their clocks, one after another, until only his own was left. He stopped it at ten past "
    "four, locked the door, and walked home along the canal without looking back.",
    "Every spring, the river rises by about two meters and covers the lower meadows for three weeks. "
    "Farmers move their sheep to the hills in March and store the hay in barns built on stone pillars. "
    "When the water goes down, it leaves a thin layer of dark mud, which makes the soil very rich. "
    "Engineers once planned a dam to hold the flood back, but the villages voted against it by a large "
    "margin. A dry meadow would have cost them more than a wet one. Today, students come from four "
    "countries to measure the mud, and the local baker sells a cake that looks exactly like it.",
    "To bake this bread, you need flour, water, salt, and two quiet days. Mix the flour with most of the "
    "water and let it rest for an hour before adding the salt. Fold the dough four times during the "
    "afternoon, with wet hands, and put it in a cold place overnight. In the morning, shape it into a "
    "ball without pressing out the air. Heat the oven as far as it will go, with an iron pot inside. Drop"
    " the dough into the pot, cut a cross on top, close the lid, and wait thirty minutes. Take the lid "
    "off and wait until the crust is the color of chestnuts. Let it cool completely before you cut it.",
    "Snow makes the forest easy to read. A hare crossed the path before midnight and stopped under the "
    "third pine to listen. A fox came later from the direction of the stream, but the snow was too deep "
    "for him, and he turned back. Two deer stood together near the fence until something frightened them."
    " A mouse made a thin line of steps between two stones. At the edge of the clearing, there are the "
    "marks of two wide wings, and the line of the mouse ends there. By ten in the morning, the sun has "
    "erased the whole page, and the forest keeps its secrets again until the next cold night.",
    "Engine number seven pulled its last train on a Sunday in October. People had come from the whole "
    "valley, with flags, cameras, and baskets of food. The driver, who was younger than his locomotive by"
    " fifty years, touched the whistle at every bridge. At the summit, the train stopped so that the "
    "passengers could see both sides of the mountains. Then it rolled down through eleven tunnels to the "
    "terminal, where a brass band was waiting. The fire was put out at dusk. Some say that the boiler "
    "stayed warm until Wednesday, and that a cat slept on it the whole time.",
    "The ferry left the old harbor at six in the morning, when the fog still lay on the water. On board "
    "were nine passengers, two goats, and a piano that belonged to the school on the island. The captain,"
    " a quiet woman from the north, steered by the sound of the bells. Halfway across, the engine coughed"
    " twice and stopped. Nobody spoke. The teacher opened the lid of the piano and began to play, so that"
    " other ships would hear them. After an hour, a fishing boat came out of the fog, threw a rope "
    "across, and pulled them slowly towards the shore. That evening, the children heard the whole story.",
    "The town council met on the first floor to decide about the lamp. It had burned above the square "
    "since the year of the great storm, and it used too much power. The treasurer proposed a modern lamp "
    "with a sensor. The teacher did not agree. A vote was taken, and it ended four to four. At last, "
    "somebody asked the old porter, who had changed the bulb for thirty years. He said that the lamp was "
    "never lit for the square at all. It was lit for the window on the other side, where a woman used to "
    "sew at night. Nobody had anything to add. The lamp was kept, and the porter went home.",
)

QUESTIONS = (
    "Write a long story about a lighthouse keeper who finds a letter.",
    "Give me advice for moving to a new city alone.",
    "Tell me about the life of an octopus.",
    "What led to the fall of the Roman Empire?",
    "Explain how vaccines train the immune system.",
    "Describe a walk through a market in Morocco, with all the senses.",
    "How is a violin built?",
    "Plan a weekend in the mountains for two friends.",
)

KINDS = {
    "copy": tuple(COPY_REQUEST + text for text in TEXTS),
    "free": QUESTIONS,
    "heldout": heldout_prompts(),
}
"""What `--prompts` may name. copy: the answer stands in the prompt. free: it stands nowhere. heldout: no draft model
that comes with this package was trained on them."""


def prompt_ids(tokenizer: Any, kind: str, batch_size: int) -> list[tuple[int, ...]]:
    """The first `batch_size` prompts of a kind, again from the first where there are not enough."""
    from spec_v2.demo import token_ids

    texts: Sequence[str] = KINDS[kind]
    return [token_ids(tokenizer, texts[i % len(texts)]) for i in range(batch_size)]
