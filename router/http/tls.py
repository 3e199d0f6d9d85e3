"""HTTPS: the files of --ssl-certfile and the flags beside it, with uvicorn's names, and the context made of them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.flags import flag
from shared.log import event, warn


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The files, in PEM. Without `ssl_certfile` the router speaks HTTP."""

    ssl_certfile: Path | None = flag(
        None, "certificate of the router, and those that lead to its authority: HTTPS", Path, "FILE"
    )
    ssl_keyfile: Path | None = flag(
        None, "its private key; None: it is in --ssl-certfile; both are read again on SIGHUP", Path, "FILE"
    )
    ssl_keyfile_password: str | None = flag(
        None,
        "password of the key, which other users of this machine can see; a key without one, that only the router can "
        "read, is better",
        metavar="PASSWORD",
    )
    ssl_ca_certs: Path | None = flag(
        None, "authorities of clients: each client must have a certificate of one of them", Path, "FILE"
    )


class Tls:
    """The context of the HTTP server; None for plain HTTP. Raises ConfigError, which names the flag."""

    def __init__(self, options: TlsOptions) -> None:
        self._options = options
        stray = [name for name, value in vars(options).items() if value is not None]
        if options.ssl_certfile is None and stray:
            raise ConfigError(f"--{stray[0].replace('_', '-')} needs --ssl-certfile")
        self.context = None if options.ssl_certfile is None else self._new_context()

    def reload(self) -> None:
        """Use the files as they are now for new connections. If they cannot be used, the old ones stay in use."""
        if self.context is None:
            return
        try:
            self._new_context()  # first, since a context that has refused a key keeps the certificate
            self._load(self.context)
        except ConfigError as error:
            warn("certificate_not_read", reason=error)
            return
        event("certificate_read", ssl_certfile=self._options.ssl_certfile)

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        options = self._options
        certificate, key, authorities = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
        assert certificate is not None
        for name, file in (
            ("--ssl-certfile", certificate),
            ("--ssl-keyfile", key),
            ("--ssl-ca-certs", authorities),
        ):
            _check_readable(name, file)
        try:  # without a password OpenSSL would ask for one at the terminal
            context.load_cert_chain(certificate, key, password=lambda: options.ssl_keyfile_password or "")
        except (ssl.SSLError, ValueError) as error:
            files = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key else "")
            raise ConfigError(f"{files}: not a certificate and its key ({error})") from error
        if authorities is not None:
            try:
                context.load_verify_locations(authorities)
            except ssl.SSLError as error:
                raise ConfigError(f"--ssl-ca-certs {authorities}: no certificates ({error})") from error
            context.verify_mode = ssl.CERT_REQUIRED


def _check_readable(name: str, file: Path | None) -> None:
    if file is not None:
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {file} cannot be read: {error.strerror}") from error
