"""What the figures share: axes, colours that fit their background, and text that never leaves its place."""

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text
from matplotlib.transforms import Bbox, ScaledTranslation

from spec_v2.observability.markup import VISIBLE

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; their yellow is too pale for lines.
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILLION, PURPLE, GREY = "#D55E00", "#CC79A7", "#8C8C8C"

Number = float | int  # where lengths are checked at each call, an int is not a float

LARGEST, SMALLEST = 9.0, 5.0  # points
MOST_SHOWN = 14  # characters of a token


def axes_for(ax: Axes | None, width: Number, height: Number) -> Axes:
    """`ax`, or the axes of a new figure, width and height in inches. Ink is chosen to suit the background."""
    if ax is None:
        # only here: it keeps a list of figures, which a caller with `ax` may not want
        from matplotlib import pyplot as plt

        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ink = ink_on(ax)
    ax.tick_params(colors=ink, which="both")
    for part in (ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label):  # type: ignore[attr-defined]
        part.set_color(ink)
    for spine in ax.spines.values():
        spine.set_edgecolor(ink)
        spine.set_visible(False)
    return ax


def bare(ax: Axes) -> None:
    """No ticks: the drawing has labels of its own."""
    ax.set(xticks=[], yticks=[])


def background(ax: Axes) -> tuple[float, float, float]:
    """The colour behind the drawing."""
    for patch in (ax.patch, ax.figure.patch):
        r, g, b, alpha = to_rgba(patch.get_facecolor())
        if alpha > 0.5 and patch.get_visible():
            return r, g, b
    return 1.0, 1.0, 1.0


def ink_on(ax: Axes) -> str:
    """Nearly black or nearly white, whichever can be read on the axes' background."""
    return text_on(background(ax))


def text_on(colour: Any) -> str:
    """The text colour for a filled shape."""
    return "#1A1A1A" if luminance(colour) > 0.22 else "#F2F2F2"


def luminance(colour: Any) -> float:
    """Relative luminance, 0 for black and 1 for white, as the accessibility guidelines (WCAG 2) define it."""
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgba(colour)[:3])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def mix(ax: Axes, colour: Any, share: Number) -> tuple[float, float, float]:
    """`share` of a colour over the background: an opaque tint, whatever lies below."""
    over, under = to_rgba(colour), background(ax)
    r, g, b = (share * over[i] + (1 - share) * under[i] for i in range(3))
    return r, g, b


def token_text(piece: str, most: int = MOST_SHOWN) -> str:
    """A token for a figure: white space shown, cut to `most` characters, and what the font does not have written as an escape."""
    font = get_font(findfont(FontProperties()))

    def shown(c: str) -> str:
        c = VISIBLE.get(c, c)
        return c if c.isprintable() and font.get_char_index(ord(c)) else c.encode("unicode_escape").decode()

    text = "".join(map(shown, piece)) or "∅"
    return text if len(text) <= most else text[: most - 1] + "…"


class CellText(Text):
    """Text that stays in its cell, `width` by `height` at (x, y), whatever size the figure takes.

    In data units, or those of a `transform` that is given. It shrinks to fit, together with the others of its `group`, and hides where `SMALLEST` points would still be too large.
    """

    def __init__(
        self,
        ax: Axes,
        x: Number,
        y: Number,
        text: str,
        *,
        width: Number,
        height: Number,
        group: "list[CellText] | None" = None,
        largest: Number = LARGEST,
        **kwargs: Any,
    ) -> None:
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "color": ink_on(ax),
            "fontsize": largest,
        } | kwargs
        super().__init__(x, y, text, parse_math=False, **({"transform": ax.transData} | style))
        self._cell, self._largest = (width, height), largest
        self._natural: tuple[float, Bbox] | None = None
        self._group = [] if group is None else group
        self._group.append(self)
        ax.add_artist(self)
        self.set_clip_on(False)

    def draw(self, renderer: Any) -> None:
        self._fit()
        super().draw(renderer)

    def get_window_extent(self, renderer: Any = None, dpi: Number | None = None) -> Bbox:
        self._fit()
        return super().get_window_extent(renderer, dpi)

    def _fit(self) -> None:
        size = min(cell._fitting_size() for cell in self._group)
        if self.get_visible() != (size >= SMALLEST):
            self.set_visible(size >= SMALLEST)
        if self.get_visible() and self.get_fontsize() != size:
            self.set_fontsize(size)

    def _fitting_size(self) -> float:
        to_pixels = self.get_transform().transform
        (x0, y0), (x1, y1) = to_pixels([(0, 0), self._cell])
        natural = self._natural_extent()
        room = min(abs(x1 - x0) / max(natural.width, 1), abs(y1 - y0) / max(natural.height, 1))
        return float(round(self._largest * min(1.0, room), 2))

    def _natural_extent(self) -> Bbox:
        """Of the text at its largest, measured once for each resolution."""
        assert self.figure is not None
        dpi = self.figure.dpi
        if self._natural is None or self._natural[0] != dpi:
            probe = Text(0, 0, self.get_text(), fontproperties=self.get_fontproperties(), parse_math=False)
            probe.set_fontsize(self._largest)
            probe.set_figure(self.figure)
            self._natural = (dpi, probe.get_window_extent())
        return self._natural[1]


def legend_below(ax: Axes, handles: Iterable[Any], columns: int = 4) -> None:
    """The legend under the axes, where nothing is drawn."""
    shown, figure = list(handles), ax.get_figure(root=True)
    assert figure is not None
    points_below = 40 if ax.get_xlabel() and ax.xaxis.get_label_position() == "bottom" else 8
    ax.legend(
        handles=shown,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=ax.transAxes + ScaledTranslation(0, -points_below / 72, figure.dpi_scale_trans),
        borderaxespad=0,
        ncols=min(columns, len(shown)),
        frameon=False,
        fontsize=LARGEST - 1,
        labelcolor=ink_on(ax),
    )


def heading(ax: Axes, text: str) -> None:
    """The title, flush left."""
    ax.set_title(text, loc="left", fontsize=LARGEST + 1, color=ink_on(ax))
