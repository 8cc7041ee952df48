"""Identifiers with an @ or an address of Facebook: e-mail addresses, Facebook users, handles.

Each @ is examined once, and the text that is read on both sides of it contains no other @, so the time is linear in the
text.
"""

from collections.abc import Iterator

import regex

from demix.data.cues import TOKEN, Span, any_of

# Backwards from the @. Joiners come at most two at a time.
_LOCAL = regex.compile(r"(?r)(?:\w++[.%+'-]{1,2}+)*+\w++[.%+'-]{0,2}+")
# The last label has only letters. Emphasis may surround an address (`_ann@x.example_`).
_HOST = regex.compile(
    r"(?:\w{1,63}+(?:-{1,4}+\w{1,63}+){0,16}+\.){1,16}(?:[^\W\d_]{2,24}|xn--\w{1,59}+)(?:(?!-?\w)|(?=(_{1,3}+)(?!\w)))"
)
# The user name in addresses of Git servers and the like: `git@github.com:owner/name`.
_SERVICES = ("git", "hg", "svn", "gitea", "gitlab", "aur")
_MENTION = regex.compile(r"@\[[0-9]{1,20}:[0-9]{1,20}:(?:[^\]\\\n]|\\.){1,256}+\]")
_ADDRESS = regex.compile(
    r"(?<![\w.-])(?:https?://)?(?:[a-z-]{1,16}\.)?(?:facebook|fb)\.com/"
    r"(?:profile\.php\?(?:[\w=-]{1,64}&){0,8}id=[0-9]++|people/[^/\s]{1,128}/[0-9]++|groups/[^/\s]{1,128}/user/[0-9]++"
    rf"|(?!(?:{any_of('pages')})(?![\w])|\w++\.php)[a-z0-9](?:\.?[a-z0-9]){{4,49}}+(?!\w))",
    regex.IGNORECASE,
)

_KEYWORDS = any_of("keywords")
_COMMAND = regex.compile(rf"@(?:{any_of('commands')})(?=[ \t])", regex.IGNORECASE)
_KEY = regex.compile(rf"@(?:{any_of('keys')})(?=[\"'])", regex.IGNORECASE)
_USER = regex.compile(
    r"@(?=\w{2})(?=_{0,2}[^\W\d_]|[0-9]++[^\W\d]{4})"
    rf"(?!(?:{_KEYWORDS})\b|[0-9a-f]{{40}}\b)"
    r"\w++(?:[.-]++\w++)*+(?<!\.(?:com|edu|gov|io|net|org))(?![({\\`=@]|/\w)",
    regex.IGNORECASE,
)
_BARE = regex.compile(rf"(?<![\w@\\`&$%=+]|\w[.'-])(?<!{TOKEN}[.'-]?)")
_LINE_END = regex.compile(r"[^\S\n]*+(?:#[^\n]*+)?\n[^\S\n]*+")
_NAME = r"[^\W\d]\w*+"
_DEFINITION = regex.compile(
    rf"@[\w.]++\(|@(?:{_KEYWORDS})\b"
    r"|(?:(?:async|export|default|final|private|protected|public|static|abstract|open|override|data|sealed)[ ]+){0,4}"
    rf"(?:(?:async[ ]+)?(?:def|fun|func|function)[ ]*\*?[ ]*(?:<[^<>\n]{{1,64}}>[ ]*)?[\w.]*+\("
    rf"|(?:class|interface|enum|struct|object|trait|record)[ ]+{_NAME}(?:[ ]*[:(<{{]|[ ]+(?:extends|implements)\b"
    rf"|(?<=[ ]\p{{Lu}}\w{{0,64}})[ ]*$))"
    r"|(?:async|export|final|private|protected|public|static|void)[ ]+(?:[\w.<>\[\],?&*]++[ ]+){0,5}"
    r"[\w<>\[\],.*&]++(?:\(|[ ]*[;={])|(?:export|final|private|protected|public)[ ]+(?:va[lr]|readonly|const|let)\b",
    regex.MULTILINE,
)


def find(text: str) -> Iterator[Span]:
    """The spans of e-mail addresses, Facebook's users and handles in `text`; Facebook's may overlap others."""
    if "facebook.com/" in (lower := text.lower()) or "fb.com/" in lower:
        for match in _ADDRESS.finditer(text):
            yield (*match.span(), "FB_USERID")
    handles: list[tuple[int, int]] = []
    at, last = text.find("@"), 0
    while at >= 0:
        if text.startswith("[", at + 1) and (mention := _MENTION.match(text, at)):
            last = mention.end()
            yield (at, last, "FB_USERID")
        elif address := _address(text, at, last):
            last = address[1]
            yield (*address, "EMAIL")
        elif handle := _handle(text, at):
            handles.append(handle)
        at = text.find("@", max(at + 1, last))
    yield from _users(text, handles)


def _address(text: str, at: int, last: int) -> tuple[int, int] | None:
    """The e-mail address around an @, which does not begin before `last`."""
    host = _HOST.match(text, at + 1)
    if host is None:
        return None
    local = _LOCAL.match(text, last, at)
    if local is None:
        return None
    start = local.start()
    if closing := host.group(1):
        if not text.startswith(closing, start):
            return None
        start += len(closing)
    if start == at or (text.startswith((":", "/"), host.end()) and text[start:at].lower() in _SERVICES):
        return None
    return (start, host.end())


def _handle(text: str, at: int) -> tuple[int, int] | None:
    match = _USER.match(text, at) if _BARE.match(text, at) else None
    if match is None or (text[at - 1 : at] in ('"', "'") and _KEY.match(text, at)):
        return None
    return (at, match.end())


def _users(text: str, handles: list[tuple[int, int]]) -> Iterator[Span]:
    """The spans of handles. At the start of a line, a name above a definition or above a decorator is a decorator."""
    decorator = -1
    for start, end in reversed(handles):
        line = text[max(text.rfind("\n", max(start - 81, 0), start) + 1, start - 80) : start].strip()
        if line == "":
            follow = _LINE_END.match(text, end)
            if follow and (follow.end() == decorator or _DEFINITION.match(text, follow.end())):
                decorator = start
                continue
            if _COMMAND.match(text, start):
                continue
        # After a comment mark or Python's prompt it is a documentation tag or an example.
        if line not in ("/**", "///", ">>>"):
            yield (start, end, "USER")
