"""Objects under one URL: atomic writes, and create-if-absent, which every promise of the store rests on."""

from logitstore.storage.interface import Entry, Storage
from logitstore.storage.local import LocalStorage
from logitstore.storage.opening import open_storage
from logitstore.storage.remote import RemoteStorage
from logitstore.storage.threads import map_threads

__all__ = ["Entry", "LocalStorage", "RemoteStorage", "Storage", "map_threads", "open_storage"]
