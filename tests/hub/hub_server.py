"""A Hub on loopback: enough of its protocol for huggingface_hub to create, push, move and read model repositories.

Commits are kept whole in memory. Large files go the LFS way: preupload says `lfs`, the batch call gives an upload
address on a second host name, and `resolve` answers with a redirect to that host, as the Hub does with its CDN.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
LFS_LIMIT = 1000  # bytes; with the suffix below the Hub's rule is the same, only its limit is 10 MB
LFS_SUFFIXES = (".safetensors", ".bin")


@dataclass
class Repo:
    """Commits by id, oldest first: `path -> content`; branches point at them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch or commit id names; None if there is none."""
        return self.branches.get(revision, revision if revision in self.commits else None)


class Hub(ThreadingHTTPServer):
    """The server and what a test may look at or set.

    Attributes:
        repos: by id.
        moved: old repository id -> new one, answered with a redirect.
        requests: (method, path, Range header, whether a token was sent), in order.
        cut: path in a repository -> bytes after which its next download loses the connection.
        fail: path in a repository -> HTTP status of every download after a cut, until removed.
        before_commit: called before a commit is taken in, to do what somebody else does at that moment.
        shorten: path in a repository -> bytes that a download sends instead of the whole file, saying all is well.
    """

    daemon_threads = True
    token = "hf_write"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None, bool]] = []
        self.cut: dict[str, int] = {}
        self.fail: dict[str, int] = {}
        self.shorten: dict[str, int] = {}
        self.before_commit: Callable[[], object] | None = None
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}/cdn"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def create(self, repo_id: str, files: dict[str, bytes] | None = None, *, private: bool = False) -> Repo:
        """A repository with one commit on main, as the web page makes it."""
        repo = self.repos[repo_id] = Repo(private=private)
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})}, "main")
        return repo

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Contents of a revision."""
        repo = self.repos[repo_id]
        return repo.commits[repo.resolve(revision)]

    def downloads(self, path: str) -> list[str | None]:
        """Range headers of the bodies that were asked for a file of that name."""
        return [asked for method, url, asked, _ in self.requests if method == "GET" and url.endswith(f"/{path}")]


def is_lfs(path: str, content: bytes) -> bool:
    return path.endswith(LFS_SUFFIXES) and len(content) > LFS_LIMIT


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    ROUTES = (
        ("POST", r"/api/repos/create", "create_repo"),
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", rf"/api/models/{REPO}", "repo_info"),
        ("GET", rf"/api/models/{REPO}/revision/(?P<revision>[^/]+)", "repo_info"),
        ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)", "tree"),
        ("POST", rf"/api/models/{REPO}/paths-info/(?P<revision>[^/]+)", "paths_info"),
        ("POST", rf"/api/models/{REPO}/branch/(?P<branch>[^/]+)", "create_branch"),
        ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/cdn/upload/(?P<oid>[0-9a-f]{64})", "lfs_put"),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/verify", "lfs_verify"),
        ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})/(?P<path>.+)", "lfs_get"),
    )

    def log_message(self, *_):
        pass

    def answer_request(self):
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.has_token = self.headers.get("Authorization") is not None
        self.server.requests.append((self.command, url.path, self.headers.get("Range"), self.has_token))
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, url.path) if wanted == method else None
            if match:
                fields = {key: unquote(value) for key, value in match.groupdict().items()}
                new = self.server.moved.get(fields.get("repo"))
                if new is not None:
                    return self.answer(307, headers={"Location": url.path.replace(fields["repo"], new, 1)})
                if "repo" in fields and not self.may_read(fields["repo"]):
                    return self.refuse(401, "RepoNotFound", "Repository not found")
                if method == "POST" and not self.may_write():
                    return self.refuse(401, "", "Invalid username or password.")
                return getattr(self, name)(**fields)
        return self.refuse(404, "", f"no such address: {self.command} {url.path}")

    do_GET = do_HEAD = do_POST = do_PUT = answer_request

    # -- answers

    def answer(self, status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value, status: int = 200):
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str, message: str, **headers: str):
        named = {"X-Error-Code": code} if code else {}
        self.answer(status, json.dumps({"error": message}).encode(), {"X-Error-Message": message, **named, **headers})

    def may_write(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def may_read(self, repo_id: str) -> bool:
        repo = self.server.repos.get(repo_id)
        return repo is not None and (self.may_write() or not repo.private)

    # -- repositories

    def create_repo(self):
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = {"url": f"{self.server.endpoint}/{repo_id}"}
        if repo_id in self.server.repos:
            return self.answer_json(url | {"error": "You already created this model repo"}, 409)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.server.create(repo_id, private=private)
        self.answer_json(url)

    def whoami(self):
        if not self.may_write():
            return self.refuse(401, "", "Invalid username or password.")
        self.answer_json({"name": "me", "type": "user", "orgs": []})

    def validate_yaml(self):
        self.answer_json({"errors": [], "warnings": []})

    def commit_of(self, repo: str, revision: str) -> str | None:
        sha = self.server.repos[repo].resolve(revision)
        if sha is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def repo_info(self, repo: str, revision: str = "main"):
        sha = self.commit_of(repo, revision)
        if sha is not None:
            names = [{"rfilename": path} for path in self.server.repos[repo].commits[sha]]
            private = self.server.repos[repo].private
            self.answer_json({"id": repo, "modelId": repo, "sha": sha, "private": private, "siblings": names})

    def entries(self, files: dict[str, bytes]) -> list[dict]:
        found = []
        for path, content in files.items():
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_blob_id(content)}
            if is_lfs(path, content):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            found.append(entry)
        return found

    def tree(self, repo: str, revision: str):
        sha = self.commit_of(repo, revision)
        if sha is not None:
            self.answer_json(self.entries(self.server.repos[repo].commits[sha]))

    def paths_info(self, repo: str, revision: str):
        sha = self.commit_of(repo, revision)
        if sha is not None:
            names = parse_qs(self.body.decode()).get("paths", [])
            files = self.server.repos[repo].commits[sha]
            self.answer_json(self.entries({name: files[name] for name in names if name in files}))

    def create_branch(self, repo: str, branch: str):
        known = self.server.repos[repo].branches
        if branch in known:
            return self.refuse(409, "", "Reference already exists")
        known[branch] = known["main"]
        self.answer_json({}, 201)

    # -- uploads

    def preupload(self, repo: str, revision: str):
        sha = self.commit_of(repo, revision)
        if sha is None:
            return
        there = self.server.repos[repo].commits[sha]
        answers = []
        for file in json.loads(self.body)["files"]:
            path, size = file["path"], file["size"]
            mode = "lfs" if is_lfs(path, b" " * size) else "regular"
            entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in there:
                digest = hashlib.sha256(there[path]).hexdigest() if mode == "lfs" else git_blob_id(there[path])
                entry["oid"] = digest
            answers.append(entry)
        self.answer_json({"files": answers})

    def lfs_batch(self, repo: str):
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            entry = dict(wanted)
            if wanted["oid"] not in self.server.lfs:
                verify = f"{self.server.endpoint}/{repo}.git/info/lfs/objects/verify"
                upload = f"{self.server.cdn}/upload/{wanted['oid']}"
                entry["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(entry)
        self.answer_json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.refuse(400, "", "the content does not have the sha256 that the address names")
        self.server.lfs[oid] = self.body
        self.answer()

    def lfs_verify(self, repo: str):
        wanted = json.loads(self.body)
        if len(self.server.lfs.get(wanted["oid"], b"")) != wanted["size"]:
            return self.refuse(404, "", "Object does not exist")
        self.answer_json({})

    def commit(self, repo: str, revision: str):
        sha = self.commit_of(repo, revision)
        if sha is None:
            return
        files = dict(self.server.repos[repo].commits[sha])
        if self.server.before_commit is not None:
            self.server.before_commit()
            sha = self.server.repos[repo].resolve(revision)
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header" and value.get("parentCommit") not in (None, sha):
                return self.refuse(412, "", "A commit has happened since. Please refresh and try again.")
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        new = self.server.repos[repo].commit(files, revision)
        url = f"{self.server.endpoint}/{repo}/commit/{new}"
        self.answer_json({"success": True, "commitOid": new, "commitUrl": url, "hookOutput": ""})

    # -- downloads

    def resolve(self, repo: str, revision: str, path: str):
        sha = self.commit_of(repo, revision)
        if sha is None:
            return
        content = self.server.repos[repo].commits[sha].get(path)
        commit = {"X-Repo-Commit": sha}
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", **commit)
        if is_lfs(path, content):
            oid = hashlib.sha256(content).hexdigest()
            self.server.lfs[oid] = content
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
            return self.answer(302, headers={**commit, **linked, "Location": f"{self.server.cdn}/{oid}/{path}"})
        self.answer(200, content, {**commit, "ETag": f'"{git_blob_id(content)}"'})

    def lfs_get(self, oid: str, path: str):
        content = self.server.lfs[oid]
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked:
            if path in self.server.fail:
                return self.refuse(self.server.fail[path], "", "the server is not well")
            start = int(asked.group(1))
        body = content[start : self.server.shorten.get(path)]
        headers = {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.server.cut.pop(path, None) if self.command == "GET" else None
        if cut is None:
            return self.answer(206 if asked else 200, body, headers)
        # The length of the whole is promised, a part is sent, and the line goes dead.
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
