# SPDX-License-Identifier: Apache-2.0
"""Commands that hand a run on: bundle, serve, token, join."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import json_line, tell
from fedloom.cli.runs import Adapt, Force, Format, Trust, Which, checkpoint
from fedloom.core.errors import ConfigError, FedloomError

AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def bundle(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run directory.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write; without it, RUN/bundle.fedloom.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check a bundle against its own digests instead.")
    ] = None,
    which: Which = None,
    adapt: Adapt = None,
    force: Force = False,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Write one file with all that it takes to hand a run's models on, without any client's data or memory.

    Example: fedloom bundle runs/pfedhn-digits-seed0 --out digits.fedloom

    Check one: fedloom bundle --verify digits.fedloom
    """
    from fedloom import api
    from fedloom.serving.bundle import Bundle, make_bundle

    if (run is None) == (verify is None):
        raise ConfigError("Say what to do: give a run directory to bundle, or --verify FILE.")
    if run is not None:
        loaded = api.load(run, which=checkpoint(which), adapt=adapt, force=force, trust=trust)
        verify = make_bundle(loaded, out)
    assert verify is not None
    found = Bundle(verify, trust=trust)
    found.archive.check_rest()
    found.check()
    parts = {name: one["bytes"] for name, one in found.manifest["parts"].items()}
    if json:
        json_line({"bundle": str(verify), "digest": found.digest, "method": found.manifest["method"], "parts": parts})
        return
    typer.echo(f"{verify}\nsha256:{found.digest}")


def serve(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file that `fedloom bundle` wrote.")],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0: any that is free.")] = 8470,
    workers: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Processes that answer.")] = 1,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The key of `fedloom token`: newcomers too need tokens then.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="The service's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its private key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Clients must have certificates of this authority.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines too without TLS.")] = False,
    rate: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests a minute for each token, or address; 0: any number.")
    ] = 600,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long a request may take, and reading the answer.")
    ] = 20.0,
    keep_loom: Annotated[
        bool, typer.Option("--keep-loom", help="Weave newcomers' models here; do not hand the loom out.")
    ] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Run code outside of fedloom that BUNDLE names.")] = False,
) -> None:
    """Serve models from a bundle: to participants by their tokens, to newcomers in every way that the method has.

    Example: fedloom serve digits.fedloom --workers 2
    """
    from fedloom.serving.run import serve as run_service
    from fedloom.serving.settings import Settings

    settings = Settings(
        host=host, port=port, workers=workers, key=key, tls_cert=tls_cert, tls_key=tls_key, client_ca=client_ca,
        insecure=insecure, rate=rate, timeout=timeout, keep_loom=keep_loom,
    )  # fmt: skip
    run_service(bundle, settings, trust=trust, ready=lambda address: typer.echo(f"serving {bundle} at {address}"))


def token(
    key: Annotated[Path, typer.Argument(metavar="KEY", help="The key's file; a new one, if there is none.")],
    client: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="A participant, for its own model; may be repeated.")
    ] = None,
    newcomer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A newcomer who is to join; may be repeated.")
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An operator who reads metrics; may be repeated.")
    ] = None,
    days: Annotated[float, typer.Option(min=0, metavar="N", help="Days until a token expires.")] = 365,
) -> None:
    """Make tokens for a service with this key, and print each with its name.

    Example: fedloom token service.key --client 0 --newcomer ward-7
    """
    from fedloom.serving.tokens import Identity, make_key, make_token, read_key

    names = [
        *(Identity("client", name) for name in client or ()),
        *(Identity("newcomer", name) for name in newcomer or ()),
        *(Identity("operator", name) for name in operator or ()),
    ]
    if not names:
        raise ConfigError("Say whose token to make: give --client ID, --newcomer NAME or --operator NAME.")
    make_key(key)
    for identity in names:
        typer.echo(f"{identity.role} {identity.name} {make_token(read_key(key), identity, days)}")


def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="A service's address.")],
    data: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The newcomer's samples and, if any, labels: .npz with x and y, or a table."),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The newcomer's network; without it, the first participant's.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")] = Path("joined"),
    way: Annotated[
        str,
        typer.Option(
            metavar="auto|home|service",
            help="Fetch the loom, or send vectors to the service; auto: what takes fewer bytes.",
        ),
    ] = "auto",
    token_file: Annotated[
        Path | None,
        typer.Option("--token", metavar="FILE", help="A file with the line of `fedloom token`, or its token."),
    ] = None,
    ca: Annotated[Path | None, typer.Option(metavar="PEM", help="The authority of the service's certificate.")] = None,
    cert: Annotated[Path | None, typer.Option(metavar="PEM", help="A certificate of your own, for mutual TLS.")] = None,
    cert_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its private key.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(metavar="E", help="Epsilon of a private descriptor, smaller than the service's.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where downloads are kept; without it, ~/.cache/fedloom.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Join again whenever FILE changes, until stopped.")] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often to look, with --follow.")] = 5.0,
    format: Format = "safetensors",
    trust: Annotated[bool, typer.Option("--trust", help="Run code outside of fedloom that the service names.")] = False,
) -> None:
    """Get a model for a newcomer from a service, fitted on this machine, and say what was sent.

    Example: fedloom join http://127.0.0.1:8470 --data new.npz
    """
    from fedloom.data.samples import samples_from
    from fedloom.serving.join import Service, versions
    from fedloom.serving.remote import Access

    for file in (token_file, ca, cert, cert_key):
        if file and not file.is_file():
            raise ConfigError(f"There is no file {file}; give one that is there.")
    access = Access(_token_in(token_file) if token_file else None, ca, cert, cert_key)
    service = Service(url, access, epsilon=epsilon, cache=cache, trust=trust)
    joined = None
    if follow and not data.is_file():
        tell(f"There is no file {data} yet; waiting for it.")
    for x, y in versions(data, every) if follow else [samples_from(data)]:
        try:
            service.refresh()
            joined = service.join(x, y, model, way)  # type: ignore[arg-type]
        except FedloomError as error:
            if joined is None:
                raise
            tell(f"{error} Waiting for {data} to change.")  # who follows a stream goes on with the next version
            continue
        path = joined.export(out, data.stem, format)
        if joined.report:
            typer.echo(joined.report)
        typer.echo(joined.sent)
        typer.echo(path)


def _token_in(file: Path) -> str:
    """The token in a file; a name may stand before it, as `fedloom token` prints it."""
    lines = file.read_text(errors="replace").splitlines()
    if len(lines) != 1 or not lines[0].split():
        raise ConfigError(f"{file} has {len(lines)} lines; expected one, with one token.")
    return lines[0].split()[-1]
