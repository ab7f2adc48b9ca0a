"""Data of users in the layouts that FedLoom reads, written without FedLoom: tables, pictures, arrays, Hugging Face
data sets."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from PIL import Image

SITES = ("Berlin", "Paris", "Rome")


def rows(n=30, seed=0):
    """(site, age, sex, outcome): the outcome depends on the age."""
    draw = np.random.default_rng(seed)
    made = []
    for i in range(n):
        age = round(float(draw.uniform(20, 80)), 3)
        made.append((SITES[i % 3], age, "fm"[int(draw.integers(2))], "ill" if age + draw.normal(0, 5) > 50 else "well"))
    return made


def csv(made, header="client,age,sex,label"):
    return "\n".join([header, *(",".join(map(str, row)) for row in made)]) + "\n"


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def arrays(path: Path, **given) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **given)
    return path


def png(size=(8, 8), seed=0, mode="RGB", kind="PNG") -> bytes:
    draw = np.random.default_rng(seed)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    out = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8), mode).save(out, kind)
    return out.getvalue()


def pictures(folder: Path, clients=("a", "b"), classes=("cat", "dog"), each=4, size=(8, 8)) -> Path:
    """client/class/number.png, or class/number.png where there are no clients."""
    seed = 0
    for client in clients or ("",):
        for label in classes:
            for i in range(each):
                seed += 1
                write(folder / client / label / f"{i}.png", png(size, seed))
    return folder


def stream(table: pa.Table, options: ipc.IpcWriteOptions | None = None) -> bytes:
    out = io.BytesIO()
    with ipc.new_stream(out, table.schema, options=options) as writer:
        writer.write_table(table)
    return out.getvalue()


def hugging_face(folder: Path, tables: list[pa.Table], features: dict) -> Path:
    """What `Dataset.save_to_disk` of the library `datasets` 5.2 writes: Arrow streams and two files of JSON."""
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        write(folder / name, stream(table))
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "9c825affb4c8985d",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    write(folder / "state.json", json.dumps(state))
    write(folder / "dataset_info.json", json.dumps(info))
    return folder


def texts(n=24):
    return pa.table(
        {
            "text": [f"a good day number {i}" if i % 2 else f"such a bad night {i}" for i in range(n)],
            "label": [i % 2 for i in range(n)],
            "client": [SITES[i % 3] for i in range(n)],
        }
    )


TEXT_FEATURES = {
    "text": {"dtype": "string", "_type": "Value"},
    "label": {"names": ["bad", "good"], "_type": "ClassLabel"},
    "client": {"dtype": "string", "_type": "Value"},
}
