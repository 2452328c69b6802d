"""The one tree of errors. A message says where, what was expected, what was found, and what to do next."""

from __future__ import annotations


class LogitStoreError(Exception):
    """Base of every error that a user can cause or mend. The command line prints it in one line and exits with 2."""


class ConfigError(LogitStoreError):
    """An option, a configuration key or a combination of them that cannot work."""


class CorpusError(LogitStoreError):
    """Input documents that are missing, unreadable or empty."""


class StorageError(LogitStoreError):
    """The file system or bucket under a store refused: no such object, no room, no permission."""


class StoreError(LogitStoreError):
    """A store, dataset or column that is not there, or is of a format that this version cannot read."""


class DamageError(StoreError):
    """Stored bytes that do not match their digest or checksum, or cannot be decoded."""


class FreedError(StoreError):
    """Parts that a garbage collection freed, or is freeing, before a dataset version came to refer to them."""


class TokenizerError(LogitStoreError):
    """A tokenizer that cannot be loaded, rendered with, or proven on a text."""


class VocabularyError(TokenizerError):
    """Two vocabularies with too little in common to be compared, or bytes of tokens that must be misread."""


class ModelError(LogitStoreError):
    """A teacher or student that cannot be loaded, or whose outputs contradict its own description."""


class TrainingError(LogitStoreError):
    """A training run that cannot start, continue or be resumed as asked."""
