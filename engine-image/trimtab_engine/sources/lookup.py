"""Selection of a model's source. A separate module, because a source's library is imported only when it is used."""

import logging
from pathlib import Path

from trimtab_engine.sources.name import RemoteModel, Scheme
from trimtab_engine.sources.source import FetchOptions, Source


def source_of(model: RemoteModel, options: FetchOptions) -> Source:
    """Return the model's source.

    Raises:
        ConfigError: options are invalid for the source.
    """
    if model.scheme is Scheme.S3:
        from trimtab_engine.sources.s3 import S3Source

        return S3Source.reached(options.s3_addressing)
    if model.scheme is Scheme.OCI:
        from trimtab_engine.sources.oci_registry import RegistrySource

        return RegistrySource.reached(
            model, plain_http=options.registry_plain_http, auth_file=options.registry_auth_file
        )
    from trimtab_engine.sources.hub import HubSource

    return HubSource(options.endpoint)


def default_cache() -> Path:
    """Return the default cache folder: huggingface_hub's."""
    from trimtab_engine.sources import hub

    return Path(hub.default_cache())


def silence_library_logs() -> None:
    """Suppress the sources' libraries' log lines for requests and retries."""
    from trimtab_engine.sources import hub

    hub.silence_library_logs()
    for name in ("httpx", "botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
