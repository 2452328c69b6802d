"""The read path against a bucket: what a gigabyte costs the CPU of the reader, and how soon there is a first batch.

A server (moto, a process of its own) holds a dataset of parts of real size with made-up rows. Each client is a fresh
process, so that its CPU seconds, user and system, are its own; the clients take turns, and the median of the rounds
counts.

    bytes     every stored byte of every part's arrays: whole objects or ranges of 8 MiB, checked or not
    dense     tokens and scored bits as arrays, by stored bytes: they are decoded to three times as many
    first     from opening the store to the tokens and sparse rows of one block

``python benchmarks/bench_read.py [--json]``; prints tables in markdown, and what opening 100,000 blocks takes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from read_clients import BUCKET, DATASET, clients, data_objects, made_up_parts, run_client

TOKENS = {"kind": "tokens", "version": "1", "tokenizer": "made-up"}
SIGNALS = [{"kind": "signal", "version": "1", "signal": name, "teacher": "made-up"} for name in ("sparse", "scalars")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="sizes that show only that it works")
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead of a table")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        print(json.dumps(run_client(options.client)))
        return
    blocks, tokens, rounds = (2, 50_000, 1) if options.quick else (options.blocks, options.tokens, options.rounds)
    result = measure(blocks, tokens, rounds)
    print(json.dumps(result, indent=1) if options.json else markdown(result))


def measure(num_blocks: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Median figures of every client that can run here, by task and client."""
    with s3_server() as environment:
        os.environ.update(environment)
        stored_bytes = fill(num_blocks, num_tokens)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in clients()}
        for _ in range(rounds):
            for name, found in runs.items():
                command = [sys.executable, __file__, "--client", name]
                ran = subprocess.run(command, capture_output=True, text=True)
                if ran.returncode:
                    raise SystemExit(f"{name}: {ran.stderr}")
                found.append(json.loads(ran.stdout))
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }
    return {
        "num_blocks": num_blocks,
        "tokens_per_block": num_tokens,
        "stored_bytes": stored_bytes,
        "rounds": rounds,
        "clients": medians,
        "opening": measure_opening(rounds),
    }


def measure_opening(rounds: int) -> dict[str, float]:
    """Seconds and bytes of memory that a fresh process needs to open a version of 100,000 blocks and five columns."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from big_dataset import open_elsewhere, write_big_dataset

    with tempfile.TemporaryDirectory() as folder:
        write_big_dataset(folder)
        found = [open_elsewhere(folder) for _ in range(rounds)]
    return {key: statistics.median(run[key] for run in found) for key in ("seconds", "peak_bytes")}


def markdown(result: dict[str, Any]) -> str:
    opening, size = result["opening"], result["stored_bytes"] / 1e6
    lines = [
        f"{result['num_blocks']} blocks of {result['tokens_per_block']:,} tokens, {size:.0f} MB in a bucket (moto, "
        f"another process on the same {os.cpu_count()} cores); medians of {result['rounds']} rounds, in turn.",
        "",
        "| task | client | CPU s/GB | wall s/GB |",
        "|---|---|---|---|",
    ]
    for name, run in result["clients"].items():
        task, _, client = name.partition(": ")
        if task != "first":
            gigabytes = run["bytes"] / 1e9
            lines.append(f"| {task} | {client} | {run['cpu'] / gigabytes:.2f} | {run['wall'] / gigabytes:.2f} |")
    lines += ["", "| time to first batch | seconds | CPU s |", "|---|---|---|"]
    for name, run in result["clients"].items():
        task, _, client = name.partition(": ")
        if task == "first":
            lines.append(f"| {client} | {run['wall']:.2f} | {run['cpu']:.2f} |")
    lines += [
        "",
        f"Opening a dataset of 100,000 blocks and 5 columns from a local disk: {opening['seconds']:.2f} s, "
        f"{opening['peak_bytes'] / 1e6:.0f} MB at most, the interpreter and libraries included.",
    ]
    return "\n".join(lines)


# The store


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Environment variables of a client of a server that runs meanwhile."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(port)
        fsspec_options = {"endpoint_url": url, "key": "test", "secret": "test"}
        yield {
            "FSSPEC_S3": json.dumps(fsspec_options),
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("moto's server did not start; is moto[server] installed?")


def fill(num_blocks: int, num_tokens: int) -> int:
    """Publish the dataset; returns the bytes of its arrays."""
    import s3fs

    from logitstore.digests import digest_json
    from logitstore.manifest import Column, Manifest
    from logitstore.plan import Plan, PlanBlock, PlanSettings
    from logitstore.store import Store

    s3fs.S3FileSystem(**json.loads(os.environ["FSSPEC_S3"])).mkdir(BUCKET)
    store = Store.open_or_create(f"s3://{BUCKET}/store")
    digests = [digest_json(str(number)) for number in range(num_blocks)]
    plan = Plan(
        PlanSettings(4 << 20, 0),
        [PlanBlock(digest, "train", 1, 4 << 20, (1,), (0,)) for digest in digests],
        ("made-up",),
    )
    plan_digest = store.put_plan(plan)
    answers: list[list[Any]] = [[], [], []]
    for number, block in enumerate(digests):
        for column, (template, part) in enumerate(
            zip([TOKENS, *SIGNALS], made_up_parts(number, num_tokens), strict=True)
        ):
            answers[column].append(store.commit_part({**template, "block": block}, part, {"num_rows": num_tokens}, {}))
    columns = [Column.of_answers(t, "made-up", found) for t, found in zip([TOKENS, *SIGNALS], answers, strict=True)]
    store.publish(DATASET, lambda current: Manifest(plan_digest, plan, tuple(columns)))
    return sum(size for _, _, size, _ in data_objects(store))


if __name__ == "__main__":
    main()
