"""Draws the pictures of the documentation: ``python docs/drawings/draw.py`` writes the SVG files beside this one.

A picture is a light card of its own, so that it reads the same on a light and on a dark page, without a network, a
script or a font of its own.
"""

from pathlib import Path
from xml.sax.saxutils import escape

from lightning_fsdp2.parallel.pipeline.schedule import (
    Kind,
    build_orders,
    compute_bubble,
    count_in_flight,
    run_in_unit_time,
)

INK, FAINT, CARD, PANEL, LINE, WHITE = "#1f2430", "#5b6472", "#f7f8fa", "#eef1f6", "#c9ced6", "#ffffff"
COLOURS = ("#2f6fd0", "#2c8a57", "#c4620a", "#7d4bb3")
"""White text is legible on each."""


class Drawing:
    """Shapes on a card of ``width`` x ``height`` pixels; ``title`` is read to those who do not see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" font-family="system-ui, Helvetica, Arial, sans-serif">\n<title>{escape(title)}</title>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>'
        )
        self._shapes: list[str] = []
        self.box(1, 1, width - 2, height - 2, fill=CARD, radius=10)

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
        size: int = 14,
        radius: int = 5,
        dashed: bool = False,
    ) -> None:
        """A rectangle, with lines of text in its middle, which are white on a colour."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"'
            f' fill="{fill}" stroke="{line}"{dash}/>'
        )
        rows = text.split("\n") if text else []
        ink = WHITE if fill in COLOURS else INK
        for row, words in enumerate(rows):
            middle = y + height / 2 + (row - (len(rows) - 1) / 2) * size * 1.3
            self.text(x + width / 2, middle + size * 0.35, words, ink=ink, size=size, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        ink: str = INK,
        size: int = 14,
        anchor: str = "start",
        bold: bool = False,
        upwards: bool = False,
    ) -> None:
        """A line of text, its baseline at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        turn = f' transform="rotate(-90 {x:g} {y:g})"' if upwards else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"{weight}{turn}'
            f' xml:space="preserve">{escape(words)}</text>'
        )

    def triangle(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """The half of a box that lies below its diagonal."""
        self._shapes.append(f'<path d="M{x} {y} L{x + width} {y + height} L{x} {y + height} z" fill="{fill}"/>')

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
    drawing = Drawing(760, 330, "A module without sharding code, a strategy, and the ranks that share the model")
    drawing.text(20, 36, "what you write", ink=FAINT)
    drawing.box(20, 52, 205, 112, "your LightningModule,\na Hugging Face model in it,\nno sharding code")
    drawing.box(20, 182, 205, 92, fill=PANEL)
    for row, words in enumerate(("strategy: fsdp2", "    dp_replicate_size: 2", "    tp_size: 2")):
        drawing.text(36, 212 + row * 20, words)
    drawing.arrow(230, 163, 276, 163)
    drawing.text(290, 36, "what trains: two nodes of four GPUs", ink=FAINT)
    for node in range(2):
        left = 290 + node * 230
        drawing.box(left, 52, 215, 222, fill=PANEL)
        drawing.text(left + 107, 74, f"replica {node}, on node {node}", size=13, anchor="middle")
        for rank in range(4):
            shard, part = divmod(rank, 2)
            x, y = left + 12 + part * 98, 86 + shard * 92
            drawing.box(x, y, 92, 82)
            drawing.text(x + 46, y + 20, f"rank {4 * node + rank}", size=13, anchor="middle")
            drawing.box(x + 8, y + 29, 76, 45, f"shard {shard} of\nhalf {part}", fill=COLOURS[rank], size=13)
    drawing.text(380, 306, "loss, gradients and weights are those of one process", anchor="middle", bold=True)
    return drawing


def draw_mesh() -> Drawing:
    """Sixteen ranks on two nodes, each with its place on the four axes."""
    drawing = Drawing(760, 392, "Sixteen ranks: 2 replicas of 2 shards, of 2 context and 2 tensor parallel ranks each")
    for replica in range(2):
        top = 46 + replica * 172
        drawing.text(20, top - 12, f"node {replica}  =  dp_replicate {replica}", size=15, bold=True)
        drawing.box(20, top, 720, 124, fill=PANEL)
        for shard in range(2):
            drawing.text(32 + shard * 356, top + 21, f"dp_shard {shard}: reads its own batch", ink=FAINT)
            for cp in range(2):
                left, colour = 32 + shard * 356 + cp * 174, COLOURS[2 * shard + cp]
                drawing.box(left, top + 30, 166, 84, line=colour, radius=7, dashed=True)
                for tp in range(2):
                    rank = replica * 8 + shard * 4 + cp * 2 + tp
                    label = f"rank {rank}\ncp {cp}\ntp {tp}"
                    drawing.box(left + 8 + tp * 77, top + 38, 73, 68, label, fill=colour)
    drawing.text(20, 376, "dashed: a tensor parallel group, the ranks with the fastest links between them", ink=FAINT)
    return drawing


def draw_units() -> Drawing:
    """The life of one unit in a step."""
    drawing = Drawing(760, 300, "A unit is gathered before it computes, freed behind it, and its gradients are reduced")
    for column, name in enumerate(("at rest", "all-gather", "forward", "freed", "backward", "reduce-scatter")):
        x, is_whole = 104 + column * 108, name in ("all-gather", "forward", "backward")
        drawing.text(x + 46, 34, name, size=13, ink=FAINT, anchor="middle")
        for rank in range(3):
            y = 50 + rank * 64
            for part in range(3):
                is_here = is_whole or part == rank
                drawing.box(x + part * 31, y, 29, 48, fill=COLOURS[part] if is_here else WHITE, dashed=not is_here)
            if column < 5:
                drawing.arrow(x + 94, y + 24, x + 106, y + 24)
    for rank in range(3):
        drawing.text(20, 81 + rank * 64, f"rank {rank}")
    drawing.text(104, 262, "Colours are thirds of a unit's weights; behind the reduce-scatter, of its gradients.")
    drawing.text(104, 284, "While a unit computes, the next one is being gathered.")
    return drawing


def draw_tensor_parallel() -> Drawing:
    """One layer on two tensor parallel ranks, with sequence parallelism."""
    drawing = Drawing(760, 330, "Norms hold a part of the sequence, attention and MLP a part of the heads or the width")
    left = 64
    for name, part, collective in (
        ("norm", "", "all-gather"),
        ("attention", "half of the heads", "reduce-scatter"),
        ("norm", "", "all-gather"),
        ("MLP", "half of the width", "reduce-scatter"),
    ):
        width = 146 if part else 102
        drawing.text(left + width / 2, 34, name, size=15, anchor="middle", bold=True)
        for rank, colour in enumerate(COLOURS[:2]):
            y = 46 + rank * 112
            drawing.box(left, y, width, 100, line=colour)
            top, height = (10, 32) if part else (10 + 16 * rank, 16)
            drawing.box(left + 10, y + top, width - 20, height, fill=colour)
            for row, words in enumerate(("whole sequence,", part) if part else ("half of the", "sequence")):
                drawing.text(left + width / 2, y + 64 + row * 18, words, size=13, anchor="middle")
        left += width + 8
        drawing.box(left, 46, 30, 212, fill="#e3e7ee")
        drawing.text(left + 20, 152, collective, anchor="middle", upwards=True)
        left += 38
    for rank in range(2):
        drawing.text(14, 100 + rank * 112, f"tp {rank}")
    drawing.text(64, 288, "As many bytes as the two all-reduces of plain tensor parallelism, and activations between")
    drawing.text(64, 308, "the layers that are tp_size times smaller.")
    return drawing


def draw_context_parallel() -> Drawing:
    """A sequence on two context parallel ranks, and the pairs of positions that each computes."""
    drawing = Drawing(760, 340, "One rank has the first and last chunk of a sequence, the other the two in the middle")
    owners = (0, 1, 1, 0)
    drawing.text(20, 34, "one sequence, in 2 x cp_size chunks", ink=FAINT)
    for chunk, owner in enumerate(owners):
        drawing.box(20 + chunk * 80, 48, 76, 44, f"chunk {chunk}", fill=COLOURS[owner])
    for rank in range(2):
        y = 138 + rank * 74
        drawing.text(20, y + 28, f"cp {rank}")
        for index, chunk in enumerate(chunk for chunk, owner in enumerate(owners) if owner == rank):
            drawing.box(66 + index * 80, y, 76, 44, f"chunk {chunk}", fill=COLOURS[rank])
        drawing.text(238, y + 19, "keys and values of", size=13, ink=FAINT)
        drawing.text(238, y + 36, "the others: fetched", size=13, ink=FAINT)
    drawing.text(420, 34, "queries (down) and the keys they see", ink=FAINT)
    for query, owner in enumerate(owners):
        drawing.text(414, 79 + query * 58, str(query), ink=FAINT, anchor="end")
        for key in range(4):
            x, y = 424 + key * 76, 48 + query * 58
            if key < query:
                drawing.box(x, y, 72, 54, f"cp {owner}", fill=COLOURS[owner], radius=2)
                continue
            drawing.box(x, y, 72, 54, radius=2, dashed=True)
            if key == query:
                drawing.triangle(x, y, 72, 54, fill=COLOURS[owner])
    drawing.text(20, 308, "Everything but attention works on a rank's own chunks. Of the causal pairs on the right")
    drawing.text(20, 327, "each rank has as many as the other: first chunks see little, last ones see much.")
    return drawing


def draw_schedules() -> Drawing:
    """Three pipeline schedules on four ranks, as their orders run when a forward takes one unit of time."""
    drawing = Drawing(760, 500, "GPipe, 1F1B and interleaved 1F1B on four ranks with eight micro-batches")
    for number, (schedule, stages) in enumerate((("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2))):
        orders = build_orders(schedule, ranks=4, micro_batches=8, stages_per_rank=stages)
        top, unit = 24 + number * 146, 20 / stages
        drawing.text(20, top + 10, schedule + (f", {stages} stages on each rank" if stages > 1 else ""), bold=True)
        kept = ", ".join(f"{count_in_flight(order) / stages:g}" for order in orders)
        facts = f"{compute_bubble(orders):.0%} idle; most micro-batches in flight: {kept}"
        drawing.text(740, top + 10, facts, size=13, ink=FAINT, anchor="end")
        for rank in range(4):
            drawing.text(20, top + 37 + rank * 27, f"rank {rank}", size=13)
            drawing.box(74, top + 20 + rank * 27, 666, 25, fill=PANEL, radius=2)
        for event in run_in_unit_time(orders):
            colour = COLOURS[2 * (event.action.stage // 4) + (event.action.kind is Kind.BACKWARD)]
            left, width = 77 + event.start * unit, (event.end - event.start) * unit - 1
            label = str(event.action.micro_batch)
            drawing.box(left, top + 22 + event.rank * 27, width, 21, label, fill=colour, line=colour, size=10, radius=1)
    for place, name in enumerate(("forward", "backward", "forward, later stage", "backward, later stage")):
        left = (20, 110, 220, 380)[place]
        drawing.box(left, 462, 14, 14, fill=COLOURS[place], line=COLOURS[place], radius=1)
        drawing.text(left + 20, 474, name, size=13)
    drawing.text(740, 474, "a number is a micro-batch", size=13, ink=FAINT, anchor="end")
    return drawing


DRAWINGS = {
    "overview": draw_overview,
    "mesh": draw_mesh,
    "units": draw_units,
    "tensor_parallel": draw_tensor_parallel,
    "context_parallel": draw_context_parallel,
    "pipeline_schedules": draw_schedules,
}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw().render())
