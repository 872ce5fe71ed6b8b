"""Every GPU check in one command, merged into one report.

    python tests/gpu/report.py --out benchmarks/results/h200

Runs ops_check, attention_check and engine_check (each can be run alone) and writes invariance.json:
``{"environment": …, "checks": [{"name", "model", "backend", "comparisons", "mismatches",
"negative_control_mismatches"}]}``, beside each check's own files and logs.  ``--merge`` only merges the files that
are there; ``--take FILE`` first replaces, in the file of that name, the checks that FILE made again (a row then names
its own commit).  Exit code 0: no mismatch and every check ran; 1: a mismatch; 2: a check failed to run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
FIELDS = ("name", "model", "backend", "comparisons", "mismatches", "negative_control_mismatches", "commit")
PARTS = {"engine": "engine_invariance.json", "attention": "attention_invariance.json", "ops": "ops_invariance.json"}


def commands(args) -> dict[str, list[str]]:
    """The command of each part, in the order they run; timings come last, when nothing else uses the GPU."""
    commit = ["--commit", args.commit] if args.commit else []
    out = ["--out", str(args.out)]
    backends = ["--backends", "triton,fa3,flashinfer"]
    every = {
        "engine": ["engine_check.py", "--plan", "full", "--backends", args.backends, "--light", "--rounds", "20",
                   "--tokens", "64", "--jobs", str(args.jobs), "--limit", str(args.limit), *commit],
        "attention": ["attention_check.py", *backends, "--only", "bits", "--jobs", str(args.jobs),
                      "--flashinfer-dims", args.flashinfer_dims, *commit],
        "ops": ["ops_check.py", "--seconds", "90", *commit],
        "speed": ["attention_check.py", *backends, "--only", "speed", "--compare", "stock_triton", *commit],
    }  # fmt: skip
    chosen = args.only.split(",") if args.only else list(every)
    return {name: [sys.executable, str(HERE / every[name][0]), *every[name][1:], *out] for name in chosen}


def merge(folder: pathlib.Path) -> dict:
    """One document of the parts' checks; the environment is that of the engine check, or of what there is."""
    checks, environment = [], None
    for name in PARTS.values():
        path = folder / name
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        environment = environment or document["environment"]
        for check in document["checks"]:
            checks.append({field: check[field] for field in FIELDS if field in check})
    return {"environment": environment, "checks": checks}


def take(folder: pathlib.Path, newer: pathlib.Path) -> None:
    """Replace the checks of the file of ``newer``'s name that ``newer`` made again; each then names its commit."""
    path = folder / newer.name
    document, other = json.loads(path.read_text()), json.loads(newer.read_text())
    key = lambda check: (check["name"], check["model"], check["backend"])
    commit = {"commit": other["environment"].get("commit")}
    made_again = {key(check): check | commit for check in other["checks"]}
    document["checks"] = [made_again.pop(key(check), check) for check in document["checks"]] + list(made_again.values())
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Run, merge, print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--backends", default="FLASH_ATTN,TRITON_ATTN,FLASHINFER")
    parser.add_argument("--jobs", type=int, default=8, help="engines, or head configurations, at a time")
    parser.add_argument("--limit", type=float, default=450, help="seconds for the engines")
    parser.add_argument("--flashinfer-dims", default="64,128,256", help="head sizes whose FlashInfer module is built")
    parser.add_argument("--only", help="of engine, attention, ops, speed")
    parser.add_argument("--merge", action="store_true", help="merge the files that are there")
    parser.add_argument("--take", type=pathlib.Path, action="append", default=[], help="newer checks; with --merge")
    parser.add_argument("--commit", help="commit of the source, for the reports")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for newer in args.take:
        take(args.out, newer)
    codes = {}
    for name, command in {} if args.merge else commands(args).items():
        started = time.time()
        with (args.out / f"{name}.log").open("w") as log:
            codes[name] = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        print(f"{name}: exit code {codes[name]}, {time.time() - started:.0f} s", flush=True)
        print("\n".join((args.out / f"{name}.log").read_text().splitlines()[-30:])[-5000:], flush=True)
    document = merge(args.out)
    (args.out / "invariance.json").write_text(json.dumps(document, indent=1) + "\n")
    wrong = [c for c in document["checks"] if c["mismatches"]]
    blind = [c for c in document["checks"] if not c["negative_control_mismatches"]]
    total = sum(c["comparisons"] for c in document["checks"])
    print(f"{total:,} comparisons, {sum(c['mismatches'] for c in wrong)} mismatches", codes)
    print("mismatches in:", [(c["name"], c["model"], c["backend"], c["mismatches"]) for c in wrong])
    print("without a failing negative control:", [(c["name"], c["model"], c["backend"]) for c in blind])
    return 1 if wrong else 2 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
