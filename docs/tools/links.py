"""What the site shows of the repository outside docs/, and links that hold on GitHub and in the site alike.

A relative link means a file of the repository, as on GitHub. Pages of the nav that lie outside docs/ are built from
where they are; other files that a page links to are copied into the site.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# [text](target), ![text](target) and the attributes of HTML; #anchors stay behind the target.
LINK = re.compile(r"""(?P<before>\]\(|\b(?:src|href|srcset)=["'])(?!\w+:|[#/])(?P<target>[^\s)"'#]+)""")


def path_of(uri: str) -> Path:
    """The file behind a page: its uri in the site is its path under docs/ or, where there is none, under the root."""
    return DOCS / uri if (DOCS / uri).exists() else ROOT / uri


def uri_of(path: Path) -> str:
    """The reverse: what the site calls a file of the repository. A folder is its README."""
    path = path / "README.md" if path.is_dir() else path
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def rewrite(markdown: str, uri: str, used=lambda target: None) -> str:
    """``markdown`` with the links of the page ``uri`` as the site has them; ``used`` is told each target's uri.

    What leads nowhere stays as it is, for the strict build to complain of.
    """

    def replace(match: re.Match) -> str:
        target = (path_of(uri).parent / match["target"]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        found = uri_of(target)
        used(found)
        return match["before"] + os.path.relpath(found, os.path.dirname(uri) or ".")

    return LINK.sub(replace, markdown)


def _strings(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in _strings(part)]


def _add(files, config, uri: str) -> None:
    from mkdocs.structure.files import File

    if files.get_file_from_path(uri) is None and path_of(uri).is_file():
        files.append(File.generated(config, uri, abs_src_path=str(path_of(uri))))


def on_files(files, config):
    for uri in _strings(config.nav):
        _add(files, config, uri)
    return files


def on_page_markdown(markdown, page, config, files):
    def copy(uri: str) -> None:
        if not uri.endswith(".md"):  # a page that the nav lacks stays out, and the strict build names it
            _add(files, config, uri)

    return rewrite(markdown, page.file.src_uri, copy)
