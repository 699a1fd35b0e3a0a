"""Draws docs/choreography.svg, one step's streams and waits, from docs/measurements/choreography_sim.json.

Usage: draw_choreography.py [OUTPUT]              without OUTPUT: docs/choreography.svg
       draw_choreography.py --journal JOURNAL     writes the JSON anew, from the last checked step of a journal, and draws it

The JSON holds what a journal (docs/journal.md) says of one step: in the order of issue, what each stream was given, runs of
operators as one entry. The picture gives every operator and every copy a length of its own choosing, and lets each begin as early
as its stream and the events that it waits for allow: what overlaps there may overlap.
"""
import json
import pathlib
import struct
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = "docs/measurements/choreography_sim.json"
COMMAND = ("sidestream train --device sim --steps 4 --layers 6 --hidden 64 --heads 4 --kv-heads 2 --ffn 128 --seq 32 --batch 2 "
           "--offload core_attn --side-streams 2 --check-steps 4 --journal JOURNAL")
KINDS = ("compute", "copy to host", "copy to device", "record", "wait", "host access", "host waits event", "host waits stream",
         "host waits device", "freed behind")
QUEUED = {"compute", "copy to host", "copy to device", "record", "wait"}

LEFT = 118
RIGHT = 16
TOP = 76
ROW = 58
BAR = 24
OPERATOR = 1.0  # lengths, in units of the picture: of a graph's
EAGER = 0.15
COPY = 22.0
UNIT = 1.3

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; }
  .ink { fill: #1f2328; }
  .quiet { fill: #59636e; }
  .lane { stroke: #d8dee4; }
  .eager { fill: #d0d7de; }
  .forward { fill: #54aeff; }
  .backward { fill: #c297ff; }
  .offload { fill: #fb8f44; }
  .reload { fill: #4ac26b; }
  .wait { stroke: #818b98; fill: none; }
  .head { fill: #818b98; }
  text { font-family: 'DejaVu Sans', Helvetica, Arial, sans-serif; font-size: 11px; }
"""


class Reader:
    """A journal's bytes, from front to back."""

    def __init__(self, data):
        self.data = data
        self.at = 0

    def take(self, form):
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values if len(values) > 1 else values[0]

    def text(self):
        length = self.take("I")
        self.at += length
        return self.data[self.at - length:self.at].decode()


def read_step(path):
    """The last step of a journal, as the JSON has it."""
    reader = Reader(pathlib.Path(path).read_bytes())
    magic = b"sidestream journal\n"
    if reader.data[:len(magic)] != magic:
        sys.exit(f"{path} is not a journal; make one with {COMMAND}")
    reader.at = len(magic)
    if reader.take("I") != 2:
        sys.exit(f"{path} is a journal with a version other than 2")
    names = [reader.text() for _ in range(reader.take("Q"))]
    streams = [reader.text() for _ in range(reader.take("Q"))]
    sites = [reader.take("IIQ") for _ in range(reader.take("Q"))]
    operations = [reader.take("BIIIIQI") for _ in range(reader.take("Q"))]
    last = max(step for _, _, step in sites)
    entries = []
    for kind, stream, event, _, site, _, _ in operations:
        name, phase, step = sites[site]
        if step != last or KINDS[kind] not in QUEUED:
            continue
        call = names[name] if names[name].startswith("blocks.") else ""
        entry = {"kind": KINDS[kind], "stream": streams[stream], "phase": names[phase] if call else "", "call": call}
        if entry["kind"] in ("record", "wait"):
            entry["event"] = event
        elif entries and all(entries[-1].get(key) == value for key, value in entry.items()):
            entries[-1]["count"] += 1
            continue
        else:
            entry["count"] = 1
        entries.append(entry)
    return {"command": COMMAND, "operations": entries}


def roles(operations):
    """What each stream is, in the order of the picture's rows, by what it was given."""
    named = {}
    for entry in operations:
        stream = entry["stream"]
        if entry["kind"] == "copy to host":
            named[stream] = "D2H"
        elif entry["kind"] == "copy to device":
            named[stream] = "H2D"
        elif entry["kind"] == "compute" and entry["call"] == "" and stream not in named:
            named[stream] = "main"
    sides = [entry["stream"] for entry in operations if entry["stream"] not in named]
    for stream in dict.fromkeys(sides):
        named[stream] = f"side {len([n for n in named.values() if n.startswith('side')]) + 1}"
    order = {"main": 0, "D2H": 8, "H2D": 9}
    return dict(sorted(named.items(), key=lambda item: (order.get(item[1], 1), item[1])))


def place(operations):
    """When each piece of work runs, and which waits hold a stream up or tie two streams together."""
    free = {}
    recorded = {}
    bars = []
    waits = []
    for entry in operations:
        stream = entry["stream"]
        now = free.get(stream, 0.0)
        if entry["kind"] == "record":
            recorded[entry["event"]] = (stream, now)
        elif entry["kind"] == "wait":
            giver = recorded.get(entry["event"])
            if giver is not None and giver[0] != stream:
                free[stream] = max(now, giver[1])
                waits.append((giver[0], giver[1], stream, free[stream]))
        else:
            operator = OPERATOR if entry["call"] else EAGER
            length = entry["count"] * (operator if entry["kind"] == "compute" else COPY)
            kind = {"copy to host": "offload", "copy to device": "reload"}.get(entry["kind"], entry["phase"])
            last = bars[-1] if bars else None
            joins = [bar for bar in bars if bar[0] == stream and bar[2] == now and bar[3:] == [kind, entry["call"]]]
            if joins:
                joins[-1][2] = now + length
            else:
                bars.append([stream, now, now + length, kind, entry["call"]])
            free[stream] = now + length
    return bars, waits


def label_of(kind, call):
    layer = call.split(".")[1] if call else ""
    return {"forward": f"forward {layer}", "backward": f"backward {layer}", "offload": f"{layer} leaves",
            "reload": f"{layer} returns"}.get(kind, "")


def draw(report):
    operations = report["operations"]
    named = roles(operations)
    bars, waits = place(operations)
    row_of = {stream: TOP + index * ROW for index, stream in enumerate(named)}
    side_rows = {stream for stream, role in named.items() if role.startswith("side")}
    end = max(bar[2] for bar in bars)
    width = LEFT + end * UNIT + RIGHT
    height = TOP + len(named) * ROW + 16

    def x(time):
        return LEFT + time * UNIT

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}">',
           f"<style>{STYLE}</style>",
           f'<rect class="card" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="6"/>',
           '<text class="ink" x="14" y="24" style="font-size: 14px; font-weight: 600">One step of six graphed layers: what each '
           "stream is given, and who waits for whom</text>",
           f'<text class="quiet" x="14" y="42">from {REPORT}: a recorded journal. Each piece of work begins as early as its '
           "stream and its waits allow; lengths are not measured.</text>"]
    for stream, role in named.items():
        y = row_of[stream] + BAR / 2
        out.append(f'<path class="lane" d="M{LEFT} {y:.1f}H{width - RIGHT:.1f}"/>')
        out.append(f'<text class="ink" x="14" y="{y + 4:.1f}">{escape(role)}</text>')
    for giver, begin, taker, until in waits:
        down = row_of[taker] > row_of[giver]
        y0 = row_of[giver] + (BAR if down else 0)
        y1 = row_of[taker] + (0 if down else BAR)
        tip = -4 if down else 4
        out.append(f'<path class="wait" d="M{x(begin):.1f} {y0:.1f}L{x(until):.1f} {y1:.1f}"/>')
        out.append(f'<path class="head" d="M{x(until):.1f} {y1:.1f}l-3 {tip}h6z"/>')
    for stream, begin, until, kind, call in bars:
        y = row_of[stream]
        on_side = stream in side_rows
        shade = kind if kind in ("offload", "reload") or on_side else "eager"
        out.append(f'<rect class="{shade}" x="{x(begin):.1f}" y="{y}" width="{max(1.0, (until - begin) * UNIT):.1f}" '
                   f'height="{BAR}"/>')
        label = label_of(kind, call)
        if label and shade != "eager" and (until - begin) * UNIT >= 6.2 * len(label):
            out.append(f'<text class="ink" x="{x((begin + until) / 2):.1f}" y="{y + BAR / 2 + 4:.1f}" '
                       f'text-anchor="middle">{escape(label)}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main(arguments):
    if arguments[:1] == ["--journal"]:
        entries = read_step(arguments[1])
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries["operations"])
        command = json.dumps(entries["command"])
        (ROOT / REPORT).write_text(f'{{"command": {command},\n "operations": [\n{lines}\n]}}\n')
        arguments = []
    output = pathlib.Path(arguments[0]) if arguments else ROOT / "docs" / "choreography.svg"
    output.write_text(draw(json.loads((ROOT / REPORT).read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
