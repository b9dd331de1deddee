"""Holds the direction of includes. A room is a folder of include/flashtile or one of its headers; each room of the C++
library includes only rooms below it, never those above or beside. Within some rooms files have such an order, too: the
roles of a kernel know what they share, and not each other.

python include_direction.py ROOT    lists what breaks the rule in the repository at ROOT, and fails if anything does
python include_direction.py --self-test ROOT    plants violations in a copy and fails unless each is found
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

# The levels go from the bottom up. Rooms of one level may not include each other.
LEVELS = [
    {"macros", "error", "tensor_view"},
    {"descales", "largest_scores"},
    {"range"},
    {"cuda"},
    {"variant", "sequence", "cache"},
    {"mask", "forward_memory"},
    {"math"},
    {"scheduler"},
    {"load"},
    {"problem"},
    {"row_results"},
    {"workspace"},
    {"plan"},
    {"kvcache", "forward_parts", "backward_order", "merge", "quantize", "counters"},
    {"registry", "begin_max_logits", "order_tiles", "mask_words", "append", "prefill", "fixed_parts"},
    {"flashtile", "params"},
    {"kvcache_params", "join_gradients", "join_parts", "prepare_backward"},
    {"mainloop", "epilogue"},
    {"kernel"},
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# These are folders whose files have an order: those of one level may not include each other.
FILES = {
    "mask": [{"band", "walk"}, {"mask", "columns"}],
    "mainloop/forward_sm90": [
        {"storage"},
        {"fragments", "descaled_weights", "largest_logits", "last_hidden", "long_sums", "pure_scores", "steps_in_one"},
        {"block_mask"},
        {"weigher"},
        {"scheduler", "producer", "pages_producer", "transposer", "widener", "consumer"},
    ],
    "mainloop/backward_one_pass_sm90": [{"storage"}, {"scheduler"}, {"producer", "consumer", "writer"}],
    "kernel/kvcache_sm80": [{"scores", "shares"}, {"source", "joining"}],
}
# Whoever computes scores, or counts them, asks the whole mask, and not its band.
MASK_ONLY = {"scheduler", "mainloop", "epilogue", "kernel"}

# These folders outside the library may include only part of it: (folder, pattern of allowed project includes).
USERS = [
    (
        "python/bindings",
        r"flashtile/(flashtile|counters|error|kvcache|merge|plan|problem|quantize|registry|tensor_view|variant)\.h",
    ),
    ("cpp/cpu", r"flashtile/(?!kernel/|mainloop/|epilogue/|scheduler/|mask/band).*"),
    ("cpp/select", r"flashtile/(?!kernel/|mainloop/|epilogue/|load/|params).*"),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def room_of(path: str) -> str:
    """The room of "flashtile/mask/band.h" is mask, that of "flashtile/plan.h" is plan."""
    return path.removeprefix("flashtile/").split("/")[0].removesuffix(".h")


def project_includes(file: Path) -> list[str]:
    return [path for path in INCLUDE.findall(file.read_text()) if path.startswith("flashtile/")]


def violations(root: Path) -> list[str]:
    found = []
    library = root / "include" / "flashtile"
    for file in sorted(library.rglob("*.h")):
        room = room_of(f"flashtile/{file.relative_to(library)}")
        if room not in LEVEL_OF:
            found.append(f"{file.relative_to(root)}: the room {room} has no level")
            continue
        for path in project_includes(file):
            other = room_of(path)
            if path == "flashtile/mask/band.h" and room in MASK_ONLY:
                found.append(f"{file.relative_to(root)}: {room} includes {path}, and not mask/mask.h")
            if other == room:
                continue
            if other not in LEVEL_OF or LEVEL_OF[other] >= LEVEL_OF[room]:
                found.append(f"{file.relative_to(root)}: {room} includes {path}, which is not below it")
    for folder, levels in FILES.items():
        level_of = {name: level for level, names in enumerate(levels) for name in names}
        for file in sorted((library / folder).glob("*.h")):
            if file.stem not in level_of:
                found.append(f"{file.relative_to(root)}: this file has no level in {folder}")
                continue
            for path in project_includes(file):
                other = path.removeprefix(f"flashtile/{folder}/").removesuffix(".h")
                if other in level_of and level_of[other] >= level_of[file.stem]:
                    found.append(f"{file.relative_to(root)}: includes {path}, which is not below it")
    for folder, allowed in USERS:
        for file in sorted((root / folder).glob("*.*")):
            for path in project_includes(file) if file.suffix in {".h", ".cpp"} else []:
                if not re.fullmatch(allowed, path):
                    found.append(f"{file.relative_to(root)}: {folder} may not include {path}")
    return found


def self_test(root: Path) -> list[str]:
    """Returns those violations, of the ones planted in a copy of the tree, that go unnoticed."""
    planted = {
        "include/flashtile/mask/band.h": "flashtile/plan.h",
        "include/flashtile/tensor_view.h": "flashtile/problem.h",
        "include/flashtile/mainloop/planted.h": "flashtile/kernel/planted.h",
        "include/flashtile/epilogue/planted.h": "flashtile/mainloop/planted.h",
        "include/flashtile/unheard_of/planted.h": "flashtile/error.h",
        "include/flashtile/mask/walk.h": "flashtile/mask/mask.h",
        "include/flashtile/mainloop/forward_sm90/producer.h": "flashtile/mainloop/forward_sm90/consumer.h",
        "include/flashtile/mainloop/forward_sm90/planted.h": "flashtile/mainloop/forward_sm90/storage.h",
        "include/flashtile/kernel/planted.h": "flashtile/mask/band.h",
        "python/bindings/planted.cpp": "flashtile/mainloop/planted.h",
        "cpp/select/planted.cpp": "flashtile/kernel/planted.h",
    }
    unnoticed = []
    for path, include in planted.items():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            for part in ("include", "cpp", "python/bindings"):
                shutil.copytree(root / part, copy / part)
            file = copy / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((file.read_text() if file.exists() else "") + f'#include "{include}"\n')
            if not any(violation.startswith(path) for violation in violations(copy)):
                unnoticed.append(f"{path} including {include}")
    return unnoticed


def main() -> int:
    root = Path(sys.argv[-1])
    problems = self_test(root) if "--self-test" in sys.argv else violations(root)
    print("\n".join(problems) or "no violation")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
