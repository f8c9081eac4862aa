"""Java classes of the comparison, compiled when it runs; without a JDK the comparison says so.

`NoForkLocalFileSystem`: without its native library, Hadoop's local file system starts a `chmod`
process for every file that it creates. This costs Structured Streaming more than anything else, so
the tuned configuration uses a local file system that sets permissions in the JVM.

`StampedRows`: a sink for real-time mode, which has no `foreachBatch`. A sink in Python would get
its rows in batches of a hundred, so that a row would wait for others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

NO_FORK = "holdfast.NoForkLocalFileSystem"

#: Extends LocalFileSystem because ``FileSystem.getLocal`` casts to it; writes no .crc files.
_NO_FORK = """\
package holdfast;

import java.io.IOException;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermission;
import java.util.EnumSet;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** The local file system without the chmod and ls processes that Hadoop starts for every file. */
public class NoForkLocalFileSystem extends LocalFileSystem {
  public NoForkLocalFileSystem() {
    super(new Raw());
  }

  @Override
  public void initialize(URI name, Configuration conf) throws IOException {
    super.initialize(name, conf);
    setWriteChecksum(false);
    setVerifyChecksum(false);
  }

  static class Raw extends RawLocalFileSystem {
    private static final PosixFilePermission[] BITS = {
      PosixFilePermission.OTHERS_EXECUTE, PosixFilePermission.OTHERS_WRITE,
      PosixFilePermission.OTHERS_READ, PosixFilePermission.GROUP_EXECUTE,
      PosixFilePermission.GROUP_WRITE, PosixFilePermission.GROUP_READ,
      PosixFilePermission.OWNER_EXECUTE, PosixFilePermission.OWNER_WRITE,
      PosixFilePermission.OWNER_READ
    };

    @Override
    public void setPermission(Path p, FsPermission permission) throws IOException {
      EnumSet<PosixFilePermission> set = EnumSet.noneOf(PosixFilePermission.class);
      for (int i = 0; i < BITS.length; i++) {
        if ((permission.toShort() >> i & 1) == 1) set.add(BITS[i]);
      }
      Files.setPosixFilePermissions(pathToFile(p).toPath(), set);
    }

    /** Without owner and mode, which the default status would ask of ls when read. */
    private static FileStatus plain(FileStatus s) {
      return new FileStatus(s.getLen(), s.isDirectory(), s.getReplication(), s.getBlockSize(),
          s.getModificationTime(), s.getPath());
    }

    @Override
    public FileStatus getFileStatus(Path p) throws IOException {
      return plain(super.getFileStatus(p));
    }

    @Override
    public FileStatus[] listStatus(Path p) throws IOException {
      FileStatus[] found = super.listStatus(p);
      for (int i = 0; i < found.length; i++) found[i] = plain(found[i]);
      return found;
    }
  }
}
"""

#: Appends "written at (us), window start (us), key, count" as a line per row, each line at once.
_STAMPED_ROWS = """\
package holdfast;

import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.util.UUID;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;

/** Writes every updated row to a file of its task, with the time of writing. */
public class StampedRows extends ForeachWriter<Row> {
  private final String folder;
  private transient FileOutputStream file;

  public StampedRows(String folder) {
    this.folder = folder;
  }

  @Override
  public boolean open(long partition, long epoch) {
    try {
      file = new FileOutputStream(folder + "/" + epoch + "-" + partition + "-" + UUID.randomUUID());
    } catch (IOException err) {
      throw new java.io.UncheckedIOException(err);
    }
    return true;
  }

  @Override
  public void process(Row row) {
    Instant now = Instant.now();
    long at = now.getEpochSecond() * 1000000L + now.getNano() / 1000;
    String line = at + "," + row.getLong(0) + "," + row.getLong(1) + "," + row.getLong(2) + "\\n";
    try {
      file.write(line.getBytes(StandardCharsets.US_ASCII));
    } catch (IOException err) {
      throw new java.io.UncheckedIOException(err);
    }
  }

  @Override
  public void close(Throwable error) {
    try {
      if (file != null) file.close();
    } catch (IOException err) {
      throw new java.io.UncheckedIOException(err);
    }
  }
}
"""


def compile_classes(folder: str | Path) -> str | None:
    """Compile the classes into a jar; None without a Java compiler."""
    import pyspark

    home = os.environ.get("JAVA_HOME")
    javac = shutil.which("javac", path=os.path.join(home, "bin")) if home else None
    javac = javac or shutil.which("javac")
    if javac is None:
        return None
    root = Path(folder)
    sources = root / "source"
    sources.mkdir(parents=True, exist_ok=True)
    texts = {"NoForkLocalFileSystem": _NO_FORK, "StampedRows": _STAMPED_ROWS}
    files = [sources / f"{name}.java" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    classes = root / "classes"
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    subprocess.run(
        [javac, "-nowarn", "-cp", str(jars), "-d", str(classes), *map(str, files)],
        check=True, capture_output=True,
    )  # fmt: skip
    jar = root / "versus.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        for compiled in sorted(classes.rglob("*.class")):
            archive.write(compiled, compiled.relative_to(classes).as_posix())
    return str(jar)
