"""Draws the pictures of the documentation: ``python docs/drawings/draw.py`` writes the SVG files beside this one.

A picture is a light card of its own, so that it reads the same on a light and on a dark page, without a network, a
script or a font of its own.
"""

from pathlib import Path
from xml.sax.saxutils import escape

INK, FAINT, CARD, LINE = "#1f2430", "#5b6472", "#f7f8fa", "#c9ced6"
BLUE, GREEN, ORANGE, PURPLE = "#2f6fd0", "#2c8a57", "#c4620a", "#7d4bb3"
SHADES = (BLUE, GREEN, ORANGE, PURPLE)
WHITE = "#ffffff"


class Drawing:
    """Shapes on a card of ``width`` x ``height``.

    Args:
        width: In pixels.
        height: In pixels.
        title: What a reader hears who does not see the picture.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" font-family="system-ui, Helvetica, Arial, sans-serif">\n<title>{escape(title)}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>'
        )
        self._shapes: list[str] = []
        self.box(1, 1, width - 2, height - 2, fill=CARD, line=LINE, radius=10)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        fill: str = WHITE,
        line: str = LINE,
        ink: str = INK,
        size: int = 15,
        radius: int = 5,
        dashed: bool = False,
    ) -> None:
        """A rectangle, with lines of text in its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}"'
            f' stroke="{line}"{dash}/>'
        )
        rows = text.split("\n") if text else []
        for row, words in enumerate(rows):
            middle = y + height / 2 + (row - (len(rows) - 1) / 2) * size * 1.3
            self.text(x + width / 2, middle + size * 0.35, words, ink=ink, size=size, anchor="middle")

    def text(
        self, x: float, y: float, words: str, *, ink: str = INK, size: int = 15, anchor: str = "start", bold: bool = False
    ) -> None:
        """A line of text, its baseline at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"{weight}'
            f' xml:space="preserve">{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A straight arrow."""
        self._shapes.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{FAINT}" stroke-width="1.6"'
            ' marker-end="url(#tip)"/>'
        )

    def render(self) -> str:
        """The text of the file."""
        return "\n".join([self._head, *self._shapes, "</svg>\n"])


def draw_overview() -> Drawing:
    """The home page: a module as it is, a few lines, and what the ranks then hold."""
    drawing = Drawing(760, 330, "A LightningModule without sharding code, a strategy, and the ranks that share the model")
    drawing.box(20, 52, 205, 112, "your LightningModule,\na Hugging Face model in it,\nno sharding code", size=14)
    drawing.box(20, 182, 205, 92, fill="#eef1f6")
    for row, words in enumerate(("strategy: fsdp2", "    dp_replicate_size: 2", "    tp_size: 2")):
        drawing.text(36, 212 + row * 20, words, size=14)
    drawing.text(20, 36, "what you write", ink=FAINT)
    drawing.arrow(230, 163, 276, 163)
    drawing.text(290, 36, "what trains: two nodes of four GPUs", ink=FAINT)
    for node in range(2):
        left = 290 + node * 230
        drawing.box(left, 52, 215, 222, fill="#eef1f6")
        drawing.text(left + 107, 74, f"replica {node}, on node {node}", size=13, anchor="middle")
        for rank in range(4):
            shard, part = divmod(rank, 2)
            x, y = left + 12 + part * 98, 86 + shard * 92
            drawing.box(x, y, 92, 82, fill=WHITE)
            drawing.text(x + 46, y + 20, f"rank {4 * node + rank}", size=13, anchor="middle")
            drawing.box(x + 8, y + 29, 76, 45, f"shard {shard} of\nhalf {part}", fill=SHADES[rank], ink=WHITE, size=13)
    drawing.text(380, 306, "loss, gradients and weights are those of one process", anchor="middle", bold=True)
    return drawing


def draw_mesh() -> Drawing:
    """Sixteen ranks on two nodes, each with its place on the four axes."""
    drawing = Drawing(760, 392, "Sixteen ranks in a mesh of 2 replicas, 2 shards, 2 context and 2 tensor parallel ranks")
    for replica in range(2):
        top = 46 + replica * 172
        drawing.text(20, top - 12, f"node {replica}  =  dp_replicate {replica}", bold=True)
        drawing.box(20, top, 720, 124, fill="#eef1f6")
        for shard in range(2):
            for cp in range(2):
                left = 32 + shard * 356 + cp * 174
                drawing.box(left, top + 30, 166, 84, line=SHADES[2 * shard + cp], radius=7, dashed=True)
                for tp in range(2):
                    rank = replica * 8 + shard * 4 + cp * 2 + tp
                    shade = SHADES[2 * shard + cp]
                    label = f"rank {rank}\ncp {cp}\ntp {tp}"
                    drawing.box(left + 8 + tp * 77, top + 38, 73, 68, label, fill=shade, ink=WHITE, size=14)
            drawing.text(32 + shard * 356, top + 21, f"dp_shard {shard}: reads its own batch", size=14, ink=FAINT)
    drawing.text(20, 376, "dashed: a tensor parallel group, the ranks with the fastest links between them", size=14, ink=FAINT)
    return drawing


def draw_units() -> Drawing:
    """The life of one unit in a step."""
    drawing = Drawing(760, 300, "A unit is gathered before it computes, freed behind it, and its gradients are reduced")
    columns = ("at rest", "all-gather", "forward", "freed", "backward", "reduce-scatter")
    for column, name in enumerate(columns):
        drawing.text(150 + column * 108, 34, name, size=13, ink=FAINT, anchor="middle")
    for rank in range(3):
        y = 50 + rank * 64
        drawing.text(20, y + 31, f"rank {rank}", size=14)
        for column in range(6):
            x = 104 + column * 108
            whole = column in (1, 2, 4)
            for part in range(3):
                here = whole or part == rank
                drawing.box(x + part * 31, y, 29, 48, fill=SHADES[part] if here else WHITE, dashed=not here)
            if column < 5:
                drawing.arrow(x + 94, y + 24, x + 106, y + 24)
    drawing.text(104, 262, "Colours are thirds of one unit's weights (behind the reduce-scatter: of its gradients).", size=14)
    drawing.text(104, 284, "While a unit computes, the next one is being gathered.", size=14)
    return drawing


def draw_tensor_parallel() -> Drawing:
    """One layer on two tensor parallel ranks, with sequence parallelism."""
    drawing = Drawing(760, 330, "With sequence parallelism norms hold a part of the sequence, attention and MLP a part of the heads")
    stages = (
        ("norm", "half of the\nsequence", False),
        ("all-gather", "", None),
        ("attention", "whole sequence,\nhalf of the heads", True),
        ("reduce-scatter", "", None),
        ("norm", "half of the\nsequence", False),
        ("all-gather", "", None),
        ("MLP", "whole sequence,\nhalf of the width", True),
        ("reduce-scatter", "", None),
    )
    x = 64.0
    for name, held, is_sharded in stages:
        if is_sharded is None:
            drawing.box(x, 46, 30, 212, fill="#e3e7ee")
            drawing._shapes.append(
                f'<text x="{x + 20}" y="152" font-size="14" fill="{INK}" text-anchor="middle"'
                f' transform="rotate(-90 {x + 20} 152)">{name}</text>'
            )
            x += 38
            continue
        width = 146 if is_sharded else 102
        drawing.text(x + width / 2, 34, name, anchor="middle", bold=True)
        for rank in range(2):
            y = 46 + rank * 112
            drawing.box(x, y, width, 100, line=SHADES[rank])
            if is_sharded:
                drawing.box(x + 10, y + 10, width - 20, 32, "", fill=SHADES[rank])
            else:
                drawing.box(x + 10, y + 10 + rank * 16, width - 20, 16, "", fill=SHADES[rank])
            for row, words in enumerate(held.split("\n")):
                drawing.text(x + width / 2, y + 64 + row * 18, words, size=13, anchor="middle")
        x += width + 8
    for rank in range(2):
        drawing.text(14, 100 + rank * 112, f"tp {rank}", size=14)
    drawing.text(64, 288, "As many bytes as the two all-reduces of plain tensor parallelism, and activations between the", size=14)
    drawing.text(64, 308, "layers that are tp_size times smaller.", size=14)
    return drawing


def draw_context_parallel() -> Drawing:
    """A sequence on two context parallel ranks, and the pairs of positions that each computes."""
    drawing = Drawing(760, 340, "Two context parallel ranks hold the first and last, and the two middle chunks of a sequence")
    drawing.text(20, 34, "one sequence, in 2 x cp_size chunks", ink=FAINT)
    owners = (0, 1, 1, 0)
    for chunk, owner in enumerate(owners):
        drawing.box(20 + chunk * 80, 48, 76, 44, f"chunk {chunk}", fill=SHADES[owner], ink=WHITE, size=14)
    for rank in range(2):
        y = 138 + rank * 74
        drawing.text(20, y + 28, f"cp {rank}", size=14)
        for index, chunk in enumerate(chunk for chunk, owner in enumerate(owners) if owner == rank):
            drawing.box(66 + index * 80, y, 76, 44, f"chunk {chunk}", fill=SHADES[rank], ink=WHITE, size=14)
        drawing.text(238, y + 28, "keys and values of", size=13, ink=FAINT)
        drawing.text(238, y + 45, "the others: fetched", size=13, ink=FAINT)
    drawing.text(20, 308, "Everything but attention works on a rank's own chunks. Of the causal pairs on the right each", size=14)
    drawing.text(20, 327, "rank has as many as the other: first chunks see little, last ones see much.", size=14)
    drawing.text(420, 34, "queries (down) and the keys they see", ink=FAINT)
    for query in range(4):
        drawing.text(414, 76 + query * 58, str(query), size=14, ink=FAINT, anchor="end")
        for key in range(4):
            x, y = 424 + key * 76, 48 + query * 58
            if key < query:
                drawing.box(x, y, 72, 54, f"cp {owners[query]}", fill=SHADES[owners[query]], ink=WHITE, size=14, radius=2)
            elif key == query:
                drawing.box(x, y, 72, 54, "", radius=2, dashed=True)
                drawing._shapes.append(
                    f'<path d="M{x} {y} L{x + 72} {y + 54} L{x} {y + 54} z" fill="{SHADES[owners[query]]}"/>'
                )
            else:
                drawing.box(x, y, 72, 54, "", radius=2, dashed=True)
    return drawing


DRAWINGS = {
    "overview": draw_overview,
    "mesh": draw_mesh,
    "units": draw_units,
    "tensor_parallel": draw_tensor_parallel,
    "context_parallel": draw_context_parallel,
}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw().render())
