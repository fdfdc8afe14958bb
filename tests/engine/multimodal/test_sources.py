"""One spelling of an address is read, where it is allowed; the table of all others keeps clients out of networks."""

import pytest
from trimtab_engine.errors import ConfigError, InvalidRequest
from trimtab_engine.multimodal.sources import AllowedHost, AllowedSources, Inline, LocalFile, RemoteFile

HOSTS = ("images.example.com", "other.example.com:8443", "10.0.0.5:9000", "[fd00::1]:80", "8.8.8.8")
OPEN = AllowedSources("/media", tuple(map(AllowedHost.parse, HOSTS)))
CLOSED = AllowedSources()


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("data:image/png;base64,AAAA", Inline("image/png", "AAAA")),
        ("DATA:Image/PNG;charset=x;base64,", Inline("image/png", "")),
        ("data:video/jpeg;base64,AAAA,BBBB", Inline("video/jpeg", "AAAA,BBBB")),
        ("file:///media/a%20cat.png", LocalFile("/media/a cat.png")),
        ("file://localhost/media/cat.png", LocalFile("/media/cat.png")),
        (
            "https://images.example.com/a/b.png?size=1",
            RemoteFile("https", "images.example.com", 443, "/a/b.png?size=1"),
        ),
        ("HTTPS://IMAGES.Example.COM./x#part", RemoteFile("https", "images.example.com", 443, "/x")),
        ("http://images.example.com", RemoteFile("http", "images.example.com", 80, "/")),
        ("https://images.example.com?x", RemoteFile("https", "images.example.com", 443, "/?x")),
        ("https://other.example.com:8443/x", RemoteFile("https", "other.example.com", 8443, "/x")),
        ("http://10.0.0.5:9000/x", RemoteFile("http", "10.0.0.5", 9000, "/x")),  # it is named itself, so it is meant
        ("http://[FD00:0:0::1]/x", RemoteFile("http", "fd00::1", 80, "/x")),
    ],
)
def test_allowed_canonical_url_is_accepted(url: str, source: object) -> None:
    assert OPEN.source(url) == source


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://2130706433/",  # 127.0.0.1 as one number
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",  # octal
        "http://127.1/",
        "http://0/",
        "http://010.8.8.8/",
        "http://8.8.2056/",  # 8.8.8.8 in three parts
        "http://134744072/",  # 8.8.8.8 as one number: allowed, but not in this spelling
        "http://8.8.8.8./",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:8.8.8.8]/",
        "http://[64:ff9b::808:808]/",
        "http://[fe80::1%25eth0]/",
        "http://[fd00::1/",
        "http://fd00::1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://user:password@images.example.com/",
        "http://images.example.com@127.0.0.1/",
        "http://images.example.com:80@127.0.0.1/",
        "http://images.example.com:80:90/",
        "http://images.example.com:/",
        "http://images.example.com:0/",
        "http://images.example.com:65616/",  # 80 in 16 bits
        "http://images.example.com:22/",
        "https://other.example.com/",  # allowed with another port
        "http://images.example.com..//",
        "http://.images.example.com/",
        "http://images.example.com.evil.org/",
        "http://evil-images.example.com/",
        "http://sub.images.example.com/",
        "http://images%2eexample%2ecom/",
        "http://%6c%6f%63%61%6c%68%6f%73%74/",
        "http://images.example.com%2f@127.0.0.1/",
        "http://images.example.com\\@127.0.0.1/",
        "http:\\\\images.example.com/",
        "http://images.example.com\t/",
        "http://images.example.com/a b",
        "http://images.example.com/\r\nX-Header: 1",
        "http://images\u3002example\u3002com/",  # an ideographic full stop
        "http://\u24d8mages.example.com/",  # a letter in a circle
        "http:///images.example.com/",
        "http:images.example.com/",
        "http://",
        "//images.example.com/x",
        "ftp://images.example.com/x",
        "gopher://images.example.com/x",
        "javascript:alert(1)",
        "blob:https://images.example.com/x",
        "/etc/passwd",
        "",
        "file://images.example.com/media/cat.png",
        "file:/media/cat.png",
        "file:///media/cat.png?x",
        "file:///media/%00",
        "file://",
        "data:image/png,AAAA",
        "data:;base64,AAAA",
        "data:image;base64,AAAA",
        "data:image/png;base64",
        "data:image/png;base64,\ud800",
        "data:image/png;base64,ä",
        "data:",
        "https://images.example.com/" + "x" * 8192,
    ],
)
def test_other_urls_are_rejected(url: str) -> None:
    with pytest.raises(InvalidRequest):
        OPEN.source(url)


def test_a_refusal_shows_little_of_what_is_long() -> None:
    with pytest.raises(InvalidRequest) as refused:
        OPEN.source("data:" + "A" * 10_000_000)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://images.example.com/x", "--allowed-media-domains.*send its content"),
        ("file:///media/cat.png", "--allowed-local-media-path.*send its content"),
    ],
)
def test_by_default_only_what_is_sent_is_read(url: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        CLOSED.source(url)
    assert CLOSED.source("data:image/png;base64,AAAA") == Inline("image/png", "AAAA")


HERE = RemoteFile("https", "images.example.com", 443, "/a")


@pytest.mark.parametrize(
    ("location", "there"),
    [
        ("/b?c", RemoteFile("https", "images.example.com", 443, "/b?c")),
        ("https://other.example.com:8443/b", RemoteFile("https", "other.example.com", 8443, "/b")),
    ],
)
def test_a_redirect_goes_where_a_client_could_have_sent_us(location: str, there: RemoteFile) -> None:
    assert OPEN.redirected(HERE, location) == there


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "https://169.254.169.254/",
        "//127.0.0.1/",
        "/\\127.0.0.1/",
        "http://images.example.com/b",  # from https to http
        "file:///media/cat.png",
        "data:image/png;base64,AAAA",
        "b",
        "",
    ],
)
def test_a_redirect_to_elsewhere_is_not_followed(location: str) -> None:
    with pytest.raises(InvalidRequest):
        OPEN.redirected(HERE, location)


@pytest.mark.parametrize(
    "text", ["*", "*.example.com", "https://example.com", "example.com/x", "a b", "", "x:0", "1.2"]
)
def test_a_host_that_is_none_is_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        AllowedHost.parse(text)
