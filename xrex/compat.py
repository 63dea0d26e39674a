"""What xrex needs of JAX and JAX does not offer: the texts that its processes share.

The only module of xrex that imports `jax._src`. `jax.distributed` starts a key-value store and has
no public way to use it; what `jax.experimental.multihost_utils` builds on it (`process_allgather`,
`sync_global_devices`) waits for ever for a process that does not come. The same in JAX 0.10.2 and
0.12.
"""

import dataclasses
from typing import Any

import jax
from jax._src import distributed


def distributed_client() -> Any:
    """The client of `jax.distributed` in this process, or None where it was not initialized."""
    return distributed.global_state.client


@dataclasses.dataclass(frozen=True)
class SharedTexts:
    """Texts by name, one store for all processes. Names are paths, as in "a/b/c"."""

    client: Any  # of `distributed_client`

    def put(self, name: str, text: str) -> None:
        """Writes a text, over the one that is there."""
        self.client.key_value_set(name, text, allow_overwrite=True)

    def put_first(self, name: str, text: str) -> bool:
        """Writes a text unless one is there; returns whether it did. One process of many does."""
        try:
            self.client.key_value_set(name, text)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
            return False
        return True

    def get(self, name: str, seconds: float) -> str | None:
        """Returns a text as soon as it is there, or None if it is not within `seconds`."""
        milliseconds = max(1, round(1000 * seconds))
        try:
            text: str = self.client.blocking_key_value_get(name, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
            return None
        return text

    def folder(self, path: str) -> dict[str, str]:
        """Returns the texts that are in a folder now, by their names in it."""
        found = self.client.key_value_dir_get(f"{path}/")
        return {name.rpartition("/")[2]: text for name, text in found}

    def delete_folder(self, path: str) -> None:
        """Deletes all texts in a folder."""
        self.client.key_value_delete(f"{path}/")
