"""What an export is asked for, and what comes of it."""

from __future__ import annotations

from compile_stage.core.records import record

FORMS = ("triton", "kserve", "oci", "bentoml")


@record
class ExportOptions:
    """What single forms ask for.

    Attributes:
        storage_uri: kserve: where the folder `bundle/` will lie for the cluster, such as `s3://models/fraud/3`.
        runtime: kserve: the serving runtime's name in the cluster.
        image: kserve: the serving image, with the packages of the model's requirements.txt; the runtime's own when
            empty.
        push: oci: `HOST[:PORT]/NAME[:TAG]` to push the artifact to; empty for nowhere.
        plain_http: oci: the registry speaks HTTP without TLS.
    """

    storage_uri: str = ""
    runtime: str = "kserve-mlserver"
    image: str = ""
    push: str = ""
    plain_http: bool = False

    def refuse(self, form: str) -> tuple[str, str] | None:
        """None, or the first option that the form has not, or lacks, and what to do about it."""
        given = {"kserve": (self.storage_uri, self.image), "oci": (self.push, self.plain_http)}
        words = {"kserve": "--storage-uri and --image", "oci": "--push and --plain-http"}
        for owner, values in given.items():
            if form != owner and any(values):
                return f"{words[owner]} are of --to {owner}", f"leave them out, or give --to {owner}"
        if form == "kserve" and not self.storage_uri:
            problem = "an InferenceService names where the model lies, and no --storage-uri was given"
            return problem, "add --storage-uri with the place that the bundle will have, such as s3://BUCKET/MODEL"
        if self.plain_http and not self.push:
            return "--plain-http is about --push", "add --push HOST/NAME:TAG, or leave it out"
        return None


@record
class Exported:
    """An export that is in its place.

    Attributes:
        folder: Absolute path.
        uri: Of the version, pinned.
        artifact_digest: Of what was proven, and is what was exported.
        proven: The export was asked, and answers as the version does.
        said: How, or why it was not.
        differs: What the server does otherwise than what was proven, a sentence each.
        start: Commands that start the server.
        reference: oci: where it was pushed, by its digest; empty where it was not.
    """

    folder: str
    form: str
    uri: str
    artifact_digest: str
    proven: bool
    said: str
    differs: tuple[str, ...]
    start: tuple[str, ...]
    reference: str = ""
