"""Differential privacy at a site: the secret of its noise, and an account of what it has given away."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.core.privacy import UploadPrivacy
from fedloom.core.tree import Tree, leaves
from fedloom.engine.privacy import Noise, secret_noise
from fedloom.storage.files import make_folder, sync_folder

SECRET = "noise.key"
ACCOUNT = "uploads.txt"  # a line for every different upload: its round and a checksum


class SitePrivacy:
    """Accounts for the uploads of a run at a site. An upload that is sent again, because the first was lost, gives
    nothing away that the first has not; another one for the same round counts."""

    def __init__(self, folder: Path, privacy: UploadPrivacy, limit: float | None = None) -> None:
        """`limit` is the epsilon that the site is willing to give away in a run."""
        self.folder, self.privacy, self.limit = folder, privacy, limit
        make_folder(folder)

    @property
    def noise(self) -> Noise:
        """Noise that only this site can compute."""
        path = self.folder / SECRET
        if not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
                os.fsync(file.fileno())
            sync_folder(self.folder)
        return secret_noise(path.read_bytes())

    @property
    def epsilon(self) -> float:
        """What was given away so far."""
        return self.privacy.epsilon(len(self._account()))

    def release(self, t: int, up: Tree) -> None:
        """Account for an upload before it is sent; raises UserError if it would give away too much."""
        made = hashlib.sha256()
        for v in leaves(up):
            made.update(v.cpu().contiguous().numpy().tobytes())
        line, known = f"{t} {made.hexdigest()}", self._account()
        if line in known:
            return
        after = self.privacy.epsilon(len(known) + 1)
        if self.limit is not None and after > self.limit:
            raise UserError(
                f"another upload would make epsilon {after:.3g}, and this site gives away {self.limit:g} at most"
            )
        with (self.folder / ACCOUNT).open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _account(self) -> set[str]:
        path = self.folder / ACCOUNT
        return set(path.read_text().splitlines()) if path.exists() else set()


def check_limit(privacy: UploadPrivacy | None, limit: float | None) -> None:
    """Raise UserError if a site has a limit, and a run protects nothing."""
    if limit is not None and privacy is None:
        raise UserError(
            f"this site asks for an epsilon of {limit:g} at most, but the run has no differential privacy (dp_clip)"
        )
