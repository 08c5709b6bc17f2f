"""What is done with a published version on a device: `validate_on`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from compile_stage.core import plugins
from compile_stage.core.events import Reporter
from compile_stage.core.records import Verification
from compile_stage.core.run_context import open_context

PathLike = str | os.PathLike[str]


def validate_on(
    uri: str,
    host: str,
    *,
    hosts: PathLike | None = None,
    allow_pickle: bool = False,
    allow_code: bool = False,
    trusted_keys: Sequence[PathLike] = (),
    signing_key: PathLike | None = None,
    reporter: Reporter | None = None,
) -> Verification:
    """Validate and measure a published version on a device that is reached over ssh or adb, by the gates of its policy,
    and attach what was found to the version.

    Args:
        uri: A registry URI.
        host: A name in the hosts file, or what `ssh` takes.
        hosts: The hosts file; by default `$COMPILE_STAGE_HOSTS`, else `hosts.yaml` in the current folder.
        allow_pickle: The source may be a pickle, which runs code of its own here, in a worker.
        allow_code: As `api.verify`; besides, the original may run on a device whose processes can't be confined.
        trusted_keys, signing_key: As for `api.validate`.

    Raises:
        DeviceError: The device can't be reached, was lost, or lacks what the artifact needs. Nothing is attached.
        UsageError: It is not hardware that the version is for; or as `api.validate`.
        IntegrityError: A file is not what was published, or the device's answer is none.
        SourceError, RegistryError, PolicyError: The source, the registry, the hosts file.
    """
    from compile_stage import attached_validation, verification
    from compile_stage.devices.validation import validate_on_device
    from compile_stage.policy.hosts import load_host
    from compile_stage.revalidation import demand_gates
    from compile_stage.signing.signers import signer_of

    device = load_host(host, hosts)
    receipt, trust = plugins.registry_for(uri).published(uri), verification.named_trust(trusted_keys)
    signer = signer_of(signing_key, None)
    with open_context(reporter, "local") as context:
        published = verification.open_published(context, receipt.uri, trust)
        demand_gates(published.manifest)
        attached_validation.demand_one_artifact(published)
        attached_validation.demand_signable(published, signer)
        verification.demand_vouched(published, allow_code=allow_code)
        found = validate_on_device(context, published, device, allow_pickle=allow_pickle, allow_code=allow_code)
        return attached_validation.attach(context, receipt, published, found, signer)
