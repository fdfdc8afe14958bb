"""Which source is asked for a model. Apart from the rest, as a source's own library is loaded only to be asked."""

import logging
from pathlib import Path

from trimtab_engine.sources.name import RemoteModel, Scheme
from trimtab_engine.sources.source import FetchOptions, Source


def source_of(model: RemoteModel, options: FetchOptions) -> Source:
    """Who has the model. Raises ConfigError for options that no source could be asked with."""
    if model.scheme is Scheme.S3:
        from trimtab_engine.sources.s3 import S3Source

        return S3Source.reached(options.s3_addressing)
    if model.scheme is Scheme.OCI:
        from trimtab_engine.sources.registry import RegistrySource

        return RegistrySource.reached(
            model, plain_http=options.registry_plain_http, auth_file=options.registry_auth_file
        )
    from trimtab_engine.sources.hub import HubSource

    return HubSource(options.endpoint)


def default_cache() -> Path:
    """Where models are kept when nobody says it: where huggingface_hub keeps them."""
    from trimtab_engine.sources import hub

    return Path(hub.default_cache())


def say_errors_alone() -> None:
    """Keep what the sources' libraries say of every request and every cut out of a server's log."""
    from trimtab_engine.sources import hub

    hub.say_errors_alone()
    for name in ("httpx", "botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
