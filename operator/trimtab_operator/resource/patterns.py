"""Regular expressions of strings in the spec, with examples for error messages."""

from __future__ import annotations

DURATION = r"^([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,6}s)?$|^[0-9]{1,8}ms$"
FINE_DURATION = r"^[0-9]{1,7}(us|ms)$"
QUANTITY = r"^[0-9]{1,15}(\.[0-9]{1,6})?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
FRACTION = r"^(0\.[0-9]{1,4}|1(\.0{1,4})?)$"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
MODEL_URI = r"^(hf|pvc|file|s3|oci)://.+$"
HUB_SCHEME = "hf://"
HTTP_URL = r"^https?://[^\s/@?#]{1,253}(/[^\s@?#]{0,200})?$"
FOLDER = r"^/?[A-Za-z0-9_-][A-Za-z0-9._/-]*$"
SERVED_NAME = r"^[A-Za-z0-9][-A-Za-z0-9_./:]*$"
REGION = r"^[a-z0-9-]{1,63}$"
HEADER_NAME = r"^[A-Za-z0-9][A-Za-z0-9-]*$"
SHA256 = r"^[0-9a-f]{64}$"

EXAMPLES = {
    MODEL_URI: "a model's URI: hf://ORG/NAME, s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY:TAG, pvc://CLAIM/FOLDER or "
    "file:///FOLDER",
    SERVED_NAME: "a name without spaces, such as qwen3-8b or org/qwen3-8b",
    DNS_LABEL: "a name of lower-case letters, digits and dashes, such as my-claim",
    HTTP_URL: "an address such as https://minio.example.com:9000",
    FOLDER: "a folder such as /models/qwen3-8b",
    REGION: "a region such as eu-central-1",
    HEADER_NAME: "a header name such as x-session-id",
    SHA256: "64 hexadecimal digits, as `printf %s KEY | sha256sum` prints",
    QUANTITY: "a quantity such as 200Gi, 1500Mi or 2G",
    DURATION: "a duration such as 90s, 5m, 1h30m or 250ms",
    FINE_DURATION: "a duration such as 125us or 2ms",
    FRACTION: 'a share from 0 to 1 with at most four digits, such as "0.9"',
}
"""Description of a valid string by regular expression."""
