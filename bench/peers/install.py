"""The peers' servers and clients, fetched where they can be had, and found again.

Servers of Redis, RabbitMQ and beanstalkd are system packages; Kafka's come as jars through Maven; clients, and NATS's
server, live in an environment of their own under `build/`, from `requirements/bench.txt`, so that the product's stays
clean.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "peers"
PINS = ROOT / "requirements" / "bench.txt"
KAFKA_VERSION = "3.9.1"  # the last that runs on Java 11 and 17 alike
SYSTEM_PACKAGES = {"redis-server": "redis-server", "rabbitmq-server": "rabbitmq-server", "beanstalkd": "beanstalkd"}

# Spark's source for Kafka, and what it needs that Spark does not ship. The connector of pyspark's own version, and the
# token provider of the connector's, are not always to be had: these work together.
SPARK_KAFKA = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", KAFKA_VERSION),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
)

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>bench</groupId><artifactId>peers</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-nop</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""


class NotInstalled(Exception):
    """Something that a peer needs is not here; the message names it."""


def program(*names: str) -> str:
    """The first of `names` that can be run."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise NotInstalled(f"no {names[-1]} on this machine")


def client_python() -> Path:
    """The interpreter that has the peers' clients."""
    found = HOME / "venv" / "bin" / "python"
    if not found.exists():
        raise NotInstalled('no clients of the peers: `make bench ARGS="peers --install"` fetches them')
    return found


def client_program(name: str) -> str:
    return program(str(HOME / "venv" / "bin" / name), name)


def kafka_jars() -> Path:
    jars = HOME / f"kafka-{KAFKA_VERSION}"
    if not any(jars.glob("kafka_*.jar")):
        raise NotInstalled("no jars of Kafka")
    return jars


def spark_kafka_jars() -> list[Path]:
    """Spark's source for Kafka; fetched, where it is not there yet."""
    jars = HOME / "spark-kafka"
    jars.mkdir(parents=True, exist_ok=True)
    found = []
    for group, name, version in SPARK_KAFKA:
        jar = jars / f"{name}-{version}.jar"
        if not jar.exists():
            copy = ["dependency:copy", f"-Dartifact={group}:{name}:{version}", f"-DoutputDirectory={jars}"]
            _run([program("mvn"), "-q", "-B", *copy], cwd=jars)
        found.append(jar)
    return found


def install_all() -> None:
    """Fetch whatever is missing. A peer that cannot be had is reported, and skipped later."""
    for what, step in (
        ("clients and NATS", _clients),
        ("Redis, RabbitMQ and beanstalkd", _system_packages),
        ("Kafka", _kafka),
    ):
        print(f"install: {what}", flush=True)
        try:
            step()
        except (NotInstalled, OSError, subprocess.CalledProcessError) as error:
            print(f"install: {what}: cannot be had: {error}", flush=True)


def _run(command: Sequence[str | Path], cwd: Path = ROOT) -> None:
    finished = subprocess.run([str(word) for word in command], cwd=cwd, check=False, capture_output=True, text=True)
    if finished.returncode:
        raise NotInstalled(f"`{command[0]}` ended with {finished.returncode}: {finished.stderr.strip()[-300:]}")


def _clients() -> None:
    done = HOME / "venv" / ".pins"
    pins = PINS.read_text(encoding="utf-8")
    if done.is_file() and done.read_text(encoding="utf-8") == pins:
        return
    HOME.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", HOME / "venv"])
    python = HOME / "venv" / "bin" / "python"
    install: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    for each in (PINS.with_name("pip.txt"), PINS):
        _run([*install, "--no-build-isolation", "--require-hashes", "--requirement", each])
    done.write_text(pins, encoding="utf-8")


def _system_packages() -> None:
    missing = [package for package, name in SYSTEM_PACKAGES.items() if shutil.which(name) is None]
    if not missing:
        return
    as_root = [] if os.geteuid() == 0 else [program("sudo")]
    # RUNLEVEL: the packages would start a server each as a service
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", program("apt-get")]
    _run([*as_root, program("apt-get"), "update", "-qq"])
    _run([*as_root, *quiet, "install", "-y", "-qq", "--no-install-recommends", *missing])


def _kafka() -> None:
    program("java")
    jars = HOME / f"kafka-{KAFKA_VERSION}"
    if any(jars.glob("kafka_*.jar")):
        return
    jars.mkdir(parents=True, exist_ok=True)
    (jars / "pom.xml").write_text(_POM.format(version=KAFKA_VERSION), encoding="utf-8")
    _run([program("mvn"), "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}"], cwd=jars)
