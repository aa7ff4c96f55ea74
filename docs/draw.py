"""Draws the six architectures, docs/<model>.svg, and the lessons' drawings, with the standard library alone.

    python docs/draw.py

Every drawing reads from the bottom up: the tokens, what mixes them, and what comes out. A circle is a return
or a reward, a square a state, a diamond an action. Dark lines are all that the last prediction reads, and a
dashed diamond is that prediction. The drawings stand on a light card, so that a dark page shows them too.
"""
from pathlib import Path

WIDTH, HEIGHT = 440, 260
FLOOR = 218                 # height of the tokens
TOP = 44                    # height of the prediction
INK, LINE, FAINT = "#28303c", "#5b6676", "#c3cad4"
BAND, EDGE, CARD = "#e9edf2", "#ccd3dc", "#fbfcfd"
FILL = {"R": "#e0a030", "r": "#e0a030", "s": "#35618f", "a": "#3f8a62"}
LETTER = {"R": INK, "r": INK, "s": "white", "a": "white"}       # on a token of this colour
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"


class Drawing:
    """A list of SVG elements; the methods append to it."""

    def __init__(self, title, width=WIDTH, height=HEIGHT):
        self.width, self.height = width, height
        self.parts = [f"<title>{title}</title>"]
        self.box(0.5, 0.5, width - 1, height - 1, 10, fill=CARD, stroke=EDGE)
        self.text(24, 34, title, 14.5, INK, "start", "bold")

    def add(self, tag, content="", **attributes):
        """Attributes are written with _ for -; numbers as short as they go."""
        text = ""
        for key, x in attributes.items():
            x = x if isinstance(x, str) else f"{x:g}"
            text += f' {key.replace("_", "-")}="{x}"'
        self.parts.append(f"<{tag}{text}>{content}</{tag}>" if content else f"<{tag}{text}/>")

    def text(self, x, y, words, size=12, color=LINE, anchor="middle", weight="normal"):
        self.add("text", words, x=x, y=y, font_size=size, fill=color, text_anchor=anchor, font_weight=weight)

    def box(self, x, y, width, height, radius=0, **style):
        self.add("rect", x=x, y=y, width=width, height=height, rx=radius, **style)

    def band(self, x, y, width, height, words="", indent=9):
        """A mixer: a pale box with its name near the upper left corner."""
        self.box(x, y, width, height, 7, fill=BAND)
        self.text(x + indent, y + 17, words, anchor="start")

    def line(self, x1, y1, x2, y2, color=INK, width=1.6, dash=""):
        """A curve that leaves and arrives upright, or a straight line."""
        middle = (y1 + y2) / 2
        if x1 == x2 or y1 == y2:
            path = f"M{x1:g} {y1:g}L{x2:g} {y2:g}"
        else:
            path = f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
        style = dict(stroke_dasharray=dash) if dash else {}
        self.add("path", d=path, fill="none", stroke=color, stroke_width=width, **style)

    def arrow(self, x, y1, y2, color=INK):
        """Straight up, with a head."""
        self.line(x, y1, x, y2 + 5, color)
        self.arrowhead(x, y2, color)

    def arrowhead(self, x, y, color=INK, turned=False):
        """Its point at (x, y), upwards; or to the right, if turned."""
        style = dict(transform=f"rotate(90 {x:g} {y:g})") if turned else {}
        self.add("path", d=f"M{x - 4:g} {y + 7:g}L{x:g} {y:g}L{x + 4:g} {y + 7:g}Z", fill=color, **style)

    def token(self, x, y, name, size=13, pale=False):
        """A token with its letter inside; pale: the last prediction does not read it."""
        kind = name[0]
        style = dict(fill_opacity=0.35) if pale else {}
        self.shape(x, y, kind, size, fill=FILL[kind], **style)
        if size > 8:
            self.text(x, y + 4.5, name, 12.5, INK if pale else LETTER[kind], weight="bold")

    def shape(self, x, y, kind, size, **style):
        if kind in "Rr":
            self.add("circle", cx=x, cy=y, r=size, **style)
        elif kind == "s":
            self.box(x - size + 1, y - size + 1, 2 * size - 2, 2 * size - 2, 3, **style)
        else:
            r = size + 2.5
            path = f"M{x:g} {y - r:g}L{x + r:g} {y:g}L{x:g} {y + r:g}L{x - r:g} {y:g}Z"
            self.add("path", d=path, **style)

    def node(self, x, y, color=INK, size=4):
        self.add("circle", cx=x, cy=y, r=size, fill=color)

    def prediction(self, x, start, name="a₃", top=TOP):
        """The action that comes out, above the place start."""
        self.arrow(x, start, top + 17)
        self.shape(x, top, "a", 13, fill=CARD, stroke=FILL["a"], stroke_width=2, stroke_dasharray="4 2.5")
        self.text(x, top + 4.5, name, 12.5, INK, weight="bold")

    def caption(self, x, words):
        """What the tokens are, under them."""
        self.text(x, self.height - 11, words, 11)

    def level(self, y, *lines):
        """Of a lesson's drawing, on the right: what stands at this height, and its shape."""
        for i, words in enumerate(lines):
            color = LINE if i else INK
            self.text(self.width - 210, y + 4 + 16 * (i - (len(lines) - 1) / 2), words, 12, color, "start")

    def svg(self):
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">'
        return "\n".join([opening, *self.parts, "</svg>", ""])


INPUTS = "returns-to-go (B, K, 1), states", "(B, K, S), actions (B, K, A)"       # of lessons' drawings
EMBEDDING = "a linear layer for each kind,", "and the timestep's embedding"
OUTPUTS = "predicted actions", "(B, K, A)"
READ = "dark lines: all that the last prediction reads"
TOKENS = ["R₁", "s₁", "a₁", "R₂", "s₂", "a₂", "R₃", "s₃"]
PLACES = [59 + 46 * i for i in range(8)]
LOW, HIGH = FLOOR - 16, 96      # where lines leave the tokens, and where they arrive


def dt():
    d = Drawing("Decision Transformer")
    d.band(22, 84, 396, 106, "attention")
    for x in PLACES[:5]:
        d.line(x, LOW, PLACES[4], HIGH, FAINT, 1.2)
    d.node(PLACES[4], HIGH, FAINT)
    for x in PLACES:
        d.line(x, LOW, PLACES[7], HIGH)
    d.node(PLACES[7], HIGH)
    for x, name in zip(PLACES, TOKENS, strict=True):
        d.token(x, FLOOR, name)
    d.caption(220, "returns, states and actions in one row")
    d.prediction(PLACES[7], HIGH)
    return d.svg()


def dc():
    d = Drawing("Decision ConvFormer")
    d.band(22, 84, 396, 106, "three short filters")
    for i in (5, 6):        # the filters of an action and of a return
        color = FILL[TOKENS[i][0]]
        for x in PLACES[i - 5:i + 1]:
            d.line(x, LOW, PLACES[i], HIGH, color, 1.1, "3 3")
        d.shape(PLACES[i], HIGH, TOKENS[i][0], 5, fill=color)
    for x in PLACES[2:]:
        d.line(x, LOW, PLACES[7], HIGH)
    d.shape(PLACES[7], HIGH, "s", 6, fill=INK)
    for i, (x, name) in enumerate(zip(PLACES, TOKENS, strict=True)):
        d.token(x, FLOOR, name, pale=i < 2)
    d.caption(220, "each kind has its filter, which sees six tokens")
    d.prediction(PLACES[7], HIGH)
    return d.svg()


def lsdt():
    d = Drawing("Long-Short Decision Transformer")
    for left, first, words in ((22, 0, "attention: long"), (226, 2, "convolution: short")):
        d.band(left, 104, 192, 66, words)
        small = [left + 19 + 21 * i for i in range(8)]
        for x in small[first:]:
            d.line(x, 158, small[7], 116)
        for i, (x, name) in enumerate(zip(small, TOKENS, strict=True)):
            d.token(x, 160, name, 4.5, pale=i < first)
        d.node(small[7], 116)
        d.line(small[7], 116, PLACES[7], 80)
        d.arrow(left + 60, 192, 172, LINE)
        d.text(left + 69, 187, "half the channels", 11, anchor="start")
    d.line(PLACES[0], 197, PLACES[7], 197, LINE, 1.2)
    for x, name in zip(PLACES, TOKENS, strict=True):
        d.line(x, LOW + 4, x, 197, LINE, 1.2)
        d.token(x, FLOOR, name)
    d.node(PLACES[7], 80, size=6)
    d.text(PLACES[7] - 12, 80, "gate", anchor="end")
    d.caption(220, "returns, states and actions in one row")
    d.prediction(PLACES[7], 76)
    return d.svg()


def radt():
    d = Drawing("Return-Aligned Decision Transformer")
    returns, main = PLACES[:3], PLACES[3:]
    last = main[4]
    d.band(174, 158, 244, 38, "attention")
    d.band(22, 102, 396, 48, "attention to the returns", indent=142)
    for x in main:
        d.line(x, LOW, last, 164)
    d.node(last, 164)
    for x in returns:
        d.line(x, LOW, x, 146)
        d.line(x, 146, last, 126)
    d.line(last, 164, last, 94)
    d.node(last, 126)
    d.line(returns[2], 146, returns[2], 84)         # the step's own return
    d.line(returns[2], 84, last - 29, 84)
    d.arrowhead(last - 22, 84, turned=True)
    d.text(returns[2] + 12, 78, "scale and shift of each norm", 11, anchor="start")
    d.box(last - 22, 74, 44, 20, 10, fill=INK)
    d.text(last, 88, "norm", 11.5, "white")
    for x, name in zip(PLACES, ["R₁", "R₂", "R₃", "s₁", "a₁", "s₂", "a₂", "s₃"], strict=True):
        d.token(x, FLOOR, name)
    d.caption(returns[1], "returns apart")
    d.caption(main[2], "states and actions")
    d.prediction(last, 74)
    return d.svg()


def starformer():
    d = Drawing("StARformer")
    d.band(22, 84, 396, 52, "attention over the steps")
    outputs = []
    for t in range(3):
        left = 22 + 138 * t
        d.band(left, 146, 88, 54)
        d.text(left + 8, 161, "in a step", 11, anchor="start")
        places = [left + 13, left + 41, left + 63, left + 79]
        g, whole = left + 74, left + 107
        for x in places:
            d.line(x, LOW, g, 166, INK, 1.3)
        d.line(g, 166, g, 130)
        d.line(whole, LOW, whole, 130)
        outputs += [g, whole]
        d.token(places[0], FLOOR, f"a{'₀₁₂'[t]}", 12)
        d.token(places[1], FLOOR, f"r{'₀₁₂'[t]}", 12)
        for x in places[2:]:
            for y in (FLOOR - 8, FLOOR + 8):
                d.token(x, y, "s", 7.5)
        d.token(whole, FLOOR, f"s{'₁₂₃'[t]}")
        d.node(g, 166)
    for x in outputs:
        d.line(x, 130, outputs[-1], HIGH)
    d.node(outputs[-1], HIGH)
    d.caption(220, "the last action and its reward, patches of the state, the state as a whole")
    d.prediction(outputs[-1], HIGH)
    return d.svg()


def dm():
    d = Drawing("Decision Mixer")
    weights = [9, 25, 6, 12, 27, 10, 22, 30]
    threshold, base, out = 18, 192, 72
    keep = [w > threshold for w in weights]
    for x, kept in zip(PLACES, keep, strict=True):      # first, since they pass behind the attention
        if not kept:
            d.line(x, base, x, out, LINE, 1.3, "4 3")
            d.node(x, out, LINE, 3)
    d.band(22, 84, 396, 60, "attention")
    d.band(22, 156, 396, 38)
    for i, (x, w, kept) in enumerate(zip(PLACES, weights, keep, strict=True)):
        if kept:
            d.line(x, 150, x, out, FAINT if i < 7 else INK)
            d.line(x, base - w, x, 150)
            d.line(x, 150, PLACES[7], HIGH)
            d.node(x, out, INK if i < 7 else CARD, 3)
        d.box(x - 8, base - w, 16, w, fill=INK if kept else FAINT)
        d.token(x, FLOOR, TOKENS[i], pale=not kept)
    d.line(26, base - threshold, 414, base - threshold, LINE, 1.2, "2 3")
    d.text(28, base - threshold - 5, "k", 11, anchor="start")
    d.node(PLACES[7], HIGH)
    d.caption(220, "a router weighs every token and keeps k; the others pass by")
    d.prediction(PLACES[7], HIGH)
    return d.svg()


def data_lesson():
    """Rewards, the returns-to-go that are added up from them, and two windows with padding and mask."""
    d = Drawing("From episodes to windows of K = 3 steps", 700, 452)
    rewards = [[0, 0, 1, 0, 1, 1], [0, 1, 0, 2]]
    starts = [46, 314]

    def circle(x, y, words, dashed=False, **style):
        if dashed:
            style = dict(stroke=LINE, stroke_width=1.4, stroke_dasharray="4 2.5")
        d.shape(x, y, "R", 13, fill=CARD if dashed else FILL["R"], **style)
        d.text(x, y + 4.5, str(words), 12.5, INK, weight="bold")

    for e, (left, earned) in enumerate(zip(starts, rewards, strict=True)):
        d.band(left - 21, 286, 42 * len(earned), 138)
        d.text(left - 12, 413, f"episode {e + 1}", 11, anchor="start")
        for i, r in enumerate(earned):      # its own reward, and the return-to-go of the step after
            x = left + 42 * i
            circle(x, 376, r, fill_opacity=0.35)
            circle(x, 314, sum(earned[i:]))
            d.arrow(x, 360, 330)
            if i + 1 < len(earned):
                d.line(x + 28, 314, x + 19, 314)
                d.add("path", d=f"M{x + 22} 310L{x + 15} 314L{x + 22} 318Z", fill=INK)
    for y, first, real in ((224, 1, 3), (130, 5, 1)):       # the first step, and how many are real
        left = starts[0] + 42 * first
        for i in range(real):
            d.line(left + 42 * i, 298, left + 42 * i, y + 20, LINE, 1.2, "2 3")
        d.band(left - 21, y - 42, 126, 62)
        for i in range(3):
            x = left + 42 * i
            circle(x, y, sum(rewards[0][first + i:]), i >= real)
            d.text(x, y - 24, "true" if i < real else "false", 11)
    d.level(60, "a batch of B windows", "returns-to-go here: (B, K, 1)")
    d.level(120, "from the last step on: one", "real step, then padding")
    d.level(214, "a window of three steps,", "above it its mask (B, K)")
    d.level(314, "returns-to-go, added up", "from the episode's end")
    d.level(376, "rewards")
    d.caption(240, "two episodes, laid end to end")
    return d.svg()


def dt_lesson():
    """The whole model with the shapes of what passes through it."""
    d = Drawing("Decision Transformer, with shapes", 700, 446)
    names, places = TOKENS + ["a₃"], [59 + 46 * i for i in range(9)]
    d.band(22, 118, 446, 26)
    d.band(22, 184, 446, 88)
    d.band(22, 338, 446, 26)
    for i, x in enumerate(places):
        d.line(x, 384, x, 322, LINE, 1.2)
        d.line(x, 290, x, 262, LINE, 1.2)
        d.token(x, 400, names[i])
        d.token(x, 306, names[i])
    for i in (1, 4, 7):
        last = i == 7
        for x in places[:i + 1]:
            d.line(x, 262, places[i], 194, INK if last else FAINT, 1.6 if last else 1.2)
        d.node(places[i], 194, INK if last else FAINT)
        d.prediction(places[i], 194, f"a{'₁₂₃'[i // 3]}", 78)
    d.level(78, *OUTPUTS)
    d.level(131, "a linear layer and tanh")
    d.level(164, "outputs at the states: (B, K, d)")
    d.level(228, "attention, then an MLP;", "n_layer such blocks")
    d.level(306, "tokens in one row", "(B, 3K, d)")
    d.level(351, *EMBEDDING)
    d.level(406, *INPUTS)
    d.caption(245, READ)
    return d.svg()


def dc_lesson():
    """Two blocks of filters of three tokens, so that one sees how reach grows from block to block."""
    d = Drawing("Decision ConvFormer, with shapes", 700, 486)
    names, places = TOKENS + ["a₃"], [59 + 46 * i for i in range(9)]
    d.band(22, 118, 446, 26)
    d.band(22, 378, 446, 26)
    for floor, top, read in ((312, 258, {5, 6, 7}), (222, 180, {7})):
        d.band(22, top - 4, 446, floor - top + 8)
        for i in sorted(range(9), key=lambda i: i in read):     # dark lines lie above the pale ones
            for x in places[max(0, i - 2):i + 1]:
                d.line(x, floor, places[i], top, INK if i in read else FAINT, 1.6 if i in read else 1)
    for i, x in enumerate(places):
        d.line(x, 424, x, 362, LINE, 1.2)
        d.line(x, 330, x, 312, LINE, 1.2)
        d.line(x, 258, x, 222, LINE, 1.2)
        d.token(x, 440, names[i], pale=i not in range(3, 8))
        d.token(x, 346, names[i], pale=i not in range(3, 8))
        for top in (258, 180):
            d.shape(x, top, names[i][0], 6, fill=FILL[names[i][0]])
    for i in (1, 4, 7):
        d.prediction(places[i], 172, f"a{'₁₂₃'[i // 3]}", 78)
    d.level(78, *OUTPUTS)
    d.level(131, "a linear layer and tanh")
    d.level(200, "second block: filters, an MLP", "(B, 3K, d)")
    d.level(284, "first block: filters, an MLP", "(B, 3K, d)")
    d.level(346, "tokens in one row", "(B, 3K, d)")
    d.level(391, *EMBEDDING)
    d.level(446, *INPUTS)
    d.caption(245, READ)
    return d.svg()


def lsdt_lesson():
    """One block with the shapes of what passes through it; the rest is the Decision Transformer's."""
    d = Drawing("Long-Short Decision Transformer, with shapes", 700, 446)
    names, out = TOKENS + ["a₃"], 381
    for left, first, words, channels in ((22, 0, "attention: long", "d - c channels"),
                                         (254, 2, "convolution: short", "c channels")):
        d.band(left, 232, 214, 92, words)
        small = [left + 15 + 23 * i for i in range(9)]
        for x in small[first:8]:
            d.line(x, 306, small[7], 248)
        for i, (x, name) in enumerate(zip(small, names, strict=True)):
            d.token(x, 308, name, 5, pale=not first <= i < 8)
        d.node(small[7], 248)
        d.line(small[7], 248, out, 206)
        d.arrow(left + 60, 356, 328, LINE)
        d.text(left + 70, 346, channels, 11.5, anchor="start")
    d.line(59, 356, 427, 356, LINE, 1.2)
    for i, name in enumerate(names):
        x = 59 + 46 * i
        d.line(x, 376, x, 356, LINE, 1.2)
        d.token(x, 392, name)
    d.band(22, 178, 446, 28, "gates")
    d.band(22, 122, 446, 28, "MLP")
    d.node(out, 206, size=5)
    d.prediction(out, 206, top=70)
    d.level(70, *OUTPUTS)
    d.level(136, "an MLP;", "n_layer such blocks")
    d.level(192, "a gate for each channel,", "then a linear layer: (B, 3K, d)")
    d.level(278, "left: reads all tokens so far", "right: averages the last six")
    d.level(338, "(B, 3K, d - c), (B, 3K, c)")
    d.level(392, "tokens in one row, as in DT", "(B, 3K, d)")
    d.caption(245, READ)
    return d.svg()


def dm_lesson():
    """A standard layer, then a mixer layer, with the shapes of what passes through them."""
    d = Drawing("Decision Mixer, with shapes", 700, 548)
    names, places = TOKENS + ["a₃"], [59 + 46 * i for i in range(9)]
    weights, threshold, base, out = [9, 25, 6, 12, 27, 10, 22, 30, 8], 18, 336, 178
    keep = [w > threshold for w in weights]
    for x, kept in zip(places, keep, strict=True):      # first, since they pass behind the attention
        if not kept:
            d.line(x, base, x, out, LINE, 1.3, "4 3")
            d.node(x, out, LINE, 3)
    d.band(22, 116, 446, 26)
    d.band(22, 194, 446, 70)
    d.band(22, 290, 446, 48)
    d.band(22, 402, 446, 26)
    d.band(22, 446, 446, 26)
    for i, (x, w, kept) in enumerate(zip(places, weights, keep, strict=True)):
        d.line(x, 490, x, 384, LINE, 1.2)
        if kept:
            d.line(x, base - w, x, out, FAINT if i < 7 else INK)
            d.line(x, 254, places[7], 206)
            d.node(x, out, INK, 3)
        d.box(x - 8, base - w, 16, w, fill=INK if kept else FAINT)
        d.token(x, 364, names[i], pale=not kept)
        d.token(x, 504, names[i])
    d.node(places[7], 206)
    d.line(26, base - threshold, 464, base - threshold, LINE, 1)
    d.text(28, base - threshold - 5, "k = 4 largest", 10.5, anchor="start")
    for i in (1, 4, 7):
        d.prediction(places[i], out, f"a{'₁₂₃'[i // 3]}", 78)
    d.level(78, *OUTPUTS)
    d.level(129, "a linear layer and tanh")
    d.level(168, "kept: Z times its weight w;", "passed by: as it was; (B, 3K, d)")
    d.level(229, "attention and MLP among", "the k kept tokens: (B, k, d)")
    d.level(314, "router: weights w (B, 3K, 1);", "hypernetwork: how many, k")
    d.level(364, "tokens in one row", "(B, 3K, d)")
    d.level(415, "a layer of the", "Decision Transformer")
    d.level(459, *EMBEDDING)
    d.level(504, *INPUTS)
    d.caption(245, "dark bars: kept; pale bars: passed by")
    return d.svg()


def radt_lesson():
    """The whole model with the shapes of what passes through it."""
    d = Drawing("Return-Aligned Decision Transformer, with shapes", 700, 566)
    returns, main = [49 + 46 * i for i in range(3)], [214 + 46 * i for i in range(6)]
    d.box(14, 150, 462, 260, 10, fill="none", stroke=EDGE, stroke_width=1.5)
    d.band(192, 112, 276, 26)
    d.band(192, 194, 276, 26)
    d.band(22, 262, 446, 58)
    d.band(192, 360, 276, 42)
    d.band(22, 462, 446, 26)
    for i, x in enumerate(returns + main):
        name = ["R₁", "R₂", "R₃", "s₁", "a₁", "s₂", "a₂", "s₃", "a₃"][i]
        d.line(x, 508, x, 446, LINE, 1.2)
        d.token(x, 524, name)
        d.token(x, 430, name)
    for i in (0, 2, 4):
        color, width = (INK, 1.6) if i == 4 else (FAINT, 1.2)
        for x in main[:i + 1]:
            d.line(x, 414, x, 396, color, width)
            d.line(x, 396, main[i], 366, color, width)
        for x in returns[:i // 2 + 1]:
            d.line(x, 414, x, 320, color, width)
            d.line(x, 320, main[i], 276, color, width)
        d.line(main[i], 366, main[i], 120, color, width)
        d.node(main[i], 366, color)
        d.node(main[i], 276, color)
        d.prediction(main[i], 120, f"a{'₁₂₃'[i // 2]}", 78)
    d.line(returns[2], 330, returns[2], 168)        # its own step's return, to every norm
    for y in (340, 242, 168):
        d.line(returns[2], y, 176, y)
        d.arrowhead(185, y, turned=True)
        d.box(192, y - 10, 276, 20, 10, fill=INK)
        d.text(330, y + 4, "layer norm", 11.5, "white")
    for i, words in enumerate(("scale", "and", "shift")):
        d.text(returns[2] - 10, 200 + 16 * i, words, 11, anchor="end")
    d.level(78, *OUTPUTS)
    d.level(125, "a linear layer and tanh")
    d.level(168, "norm: scale and shift come", "from the return of the own step")
    d.level(208, "an MLP")
    d.level(242, "norm, again by the return")
    d.level(291, "cross-attention to the returns", "up to the own step: (2K, K)")
    d.level(340, "norm, again by the return")
    d.level(381, "self-attention: (2K, 2K)", "n_layer blocks like this frame")
    d.level(430, "two rows of tokens", "(B, K, d) and (B, 2K, d)")
    d.level(475, "a linear layer for each kind;", "states, actions: plus position")
    d.level(530, *INPUTS)
    d.caption(returns[1], "returns apart")
    d.caption(main[2] + 23, "states and actions")
    return d.svg()


def starformer_lesson():
    """A group of tokens in each step, what it is folded into, and the row that is made of it."""
    d = Drawing("StARformer, with shapes", 700, 500)
    d.band(22, 118, 446, 26)
    d.band(22, 184, 446, 74)
    for t in range(3):
        left = 22 + 152 * t
        g, h = left + 60, left + 122
        d.band(left, 352, 104, 62)
        places = [left + x for x in (12, 36, 56, 69, 82, 95)]
        for x in places:
            d.line(x, 436, x, 406, LINE, 1.2)
        for x in places:        # each token of a group reads each
            for y in places:
                d.line(x, 406, y, 364, FAINT, 1.1)
        for x in places:
            d.line(x, 364, g, 330, INK, 1.3)
        d.arrow(g, 330, 300)
        d.box(g - 34, 316, 68, 20, 10, fill=INK)
        d.text(g, 330, "W, b", 11.5, "white")
        d.arrow(h, 436, 300, LINE)
        d.token(places[0], 450, f"a{'₀₁₂'[t]}", 12)
        d.token(places[1], 450, f"R{'₁₂₃'[t]}", 12)
        for x in places[2:]:
            d.token(x, 450, "s", 6)
        d.token(h, 450, f"s{'₁₂₃'[t]}")
        for x, name in ((g, "g"), (h, "h")):
            d.line(x, 272, x, 248, LINE, 1.2)
            d.box(x - 13, 272, 26, 26, 7, fill=CARD, stroke=LINE, stroke_width=1.5)
            d.text(x, 289.5, name + "₁₂₃"[t], 12.5, INK, weight="bold")
    row = [22 + 152 * t + x for t in range(3) for x in (60, 122)]
    for i in (1, 3, 5):
        last = i == 5
        for x in row[:i + 1]:
            d.line(x, 248, row[i], 194, INK if last else FAINT, 1.6 if last else 1.2)
        d.node(row[i], 194, INK if last else FAINT)
        d.prediction(row[i], 194, f"a{'₁₂₃'[i // 2]}", 78)
    d.level(78, *OUTPUTS)
    d.level(131, "a linear layer (and tanh)")
    d.level(164, "outputs at h: (B, K, d)")
    d.level(221, "sequence transformer: causal", "(B, 2K, d)")
    d.level(285, "g: one token for each group", "h: the whole state, (B, K, d) each")
    d.level(326, "a group's tokens side by side")
    d.level(383, "step transformer: in a group", "all read all, (B K, n, e)")
    d.level(450, "last action, return-to-go, the state", "in parts, and the state as a whole")
    d.caption(245, "each layer of the one hands its g to the same layer of the other")
    return d.svg()


DRAWINGS = {"dt": dt, "dc": dc, "lsdt": lsdt, "radt": radt, "starformer": starformer, "dm": dm}
LESSONS = {     # larger, for the notebooks that teach a model
    "data-lesson": data_lesson,
    "dt-lesson": dt_lesson,
    "dc-lesson": dc_lesson,
    "lsdt-lesson": lsdt_lesson,
    "radt-lesson": radt_lesson,
    "starformer-lesson": starformer_lesson,
    "dm-lesson": dm_lesson,
}

if __name__ == "__main__":
    for name, draw in (DRAWINGS | LESSONS).items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw(), encoding="utf-8")
