package peers;

import java.io.FileWriter;
import java.io.IOException;
import java.io.Serializable;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.apache.flink.api.common.eventtime.Watermark;
import org.apache.flink.api.connector.source.Boundedness;
import org.apache.flink.api.connector.source.ReaderOutput;
import org.apache.flink.api.connector.source.Source;
import org.apache.flink.api.connector.source.SourceReader;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.api.connector.source.SourceSplit;
import org.apache.flink.api.connector.source.SplitEnumerator;
import org.apache.flink.api.connector.source.SplitEnumeratorContext;
import org.apache.flink.core.io.InputStatus;
import org.apache.flink.core.io.SimpleVersionedSerializer;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.binary.BinaryStringData;
import org.apache.parquet.column.ColumnReader;
import org.apache.parquet.column.Dictionary;
import org.apache.parquet.column.impl.ColumnReadStoreImpl;
import org.apache.parquet.column.page.PageReadStore;
import org.apache.parquet.hadoop.ParquetFileReader;
import org.apache.parquet.io.LocalInputFile;
import org.apache.parquet.io.api.Binary;
import org.apache.parquet.io.api.Converter;
import org.apache.parquet.io.api.GroupConverter;
import org.apache.parquet.io.api.PrimitiveConverter;
import org.apache.parquet.schema.MessageType;

/**
 * Reads buckets, one Parquet file each, in order. The PyFlink package has no Parquet format.
 *
 * <p>Reader i takes every row group g with g mod readers = i, so that all readers advance through
 * event time together. After a bucket, each reader emits the watermark of the end of the bucket:
 * the earliest moment at which a window can close. The position is part of the checkpoints. The
 * progress files say when a reader had read each bucket (CLOCK_MONOTONIC, as in Python).
 */
public class BucketSource implements Source<RowData, BucketSource.Split, Integer> {
  private static final int ROWS_PER_CALL = 2048;

  private final String folder;
  private final String progress;
  private final int buckets;
  private final long epochMs;
  private final long widthMs;

  public BucketSource(String folder, String progress, int buckets, long epochMs, long widthMs) {
    this.folder = folder;
    this.progress = progress;
    this.buckets = buckets;
    this.epochMs = epochMs;
    this.widthMs = widthMs;
  }

  /** Position of one reader: the next row of its part of a bucket. */
  public static final class Split implements SourceSplit, Serializable {
    final int part;
    final int parts;
    final int bucket;
    final long row;

    Split(int part, int parts, int bucket, long row) {
      this.part = part;
      this.parts = parts;
      this.bucket = bucket;
      this.row = row;
    }

    @Override
    public String splitId() {
      return Integer.toString(part);
    }
  }

  @Override
  public Boundedness getBoundedness() {
    return Boundedness.CONTINUOUS_UNBOUNDED;
  }

  @Override
  public SourceReader<RowData, Split> createReader(SourceReaderContext context) {
    return new Reader();
  }

  @Override
  public SplitEnumerator<Split, Integer> createEnumerator(SplitEnumeratorContext<Split> context) {
    return new Enumerator(context, true);
  }

  @Override
  public SplitEnumerator<Split, Integer> restoreEnumerator(
      SplitEnumeratorContext<Split> context, Integer state) {
    return new Enumerator(context, false);
  }

  /** Assigns one split to each reader. After a restart the readers hold their splits already. */
  private static final class Enumerator implements SplitEnumerator<Split, Integer> {
    private final SplitEnumeratorContext<Split> context;
    private final boolean fresh;
    private final List<Split> returned = new ArrayList<>();

    Enumerator(SplitEnumeratorContext<Split> context, boolean fresh) {
      this.context = context;
      this.fresh = fresh;
    }

    @Override
    public void start() {}

    @Override
    public void handleSplitRequest(int subtask, String host) {}

    @Override
    public void addSplitsBack(List<Split> splits, int subtask) {
      returned.addAll(splits);
    }

    @Override
    public void addReader(int subtask) {
      Split split = fresh ? new Split(subtask, context.currentParallelism(), 0, 0) : null;
      for (Split candidate : returned) {
        if (candidate.part == subtask) split = candidate;
      }
      if (split != null) context.assignSplit(split, subtask);
    }

    @Override
    public Integer snapshotState(long checkpoint) {
      return 0;
    }

    @Override
    public void close() {}
  }

  private final class Reader implements SourceReader<RowData, Split> {
    private final ScheduledExecutorService timer =
        Executors.newSingleThreadScheduledExecutor(task -> {
          Thread thread = new Thread(task, "bucket-timer");
          thread.setDaemon(true);
          return thread;
        });
    private CompletableFuture<Void> available = new CompletableFuture<>();
    private int part = -1;
    private int parts;
    private int bucket;
    private long rowsToSkip;
    /** Open until the bucket is read: the pages are decompressed when they are needed. */
    private ParquetFileReader file = null;
    private int group;
    private Columns columns = null;
    private long rowsRead;
    private FileWriter marks;

    @Override
    public void start() {}

    @Override
    public void addSplits(List<Split> splits) {
      Split split = splits.get(0);
      part = split.part;
      parts = split.parts;
      bucket = split.bucket;
      rowsToSkip = split.row;
      available.complete(null);
    }

    @Override
    public InputStatus pollNext(ReaderOutput<RowData> output) throws Exception {
      if (part < 0) {
        return InputStatus.NOTHING_AVAILABLE;
      }
      if (bucket >= buckets) {
        return InputStatus.END_OF_INPUT;
      }
      if (file == null && !open()) {
        available = new CompletableFuture<>();
        CompletableFuture<Void> waiting = available;
        timer.schedule(() -> waiting.complete(null), 1, TimeUnit.MILLISECONDS);
        return InputStatus.NOTHING_AVAILABLE;
      }
      if (columns == null && group < file.getRowGroups().size()) {
        columns = new Columns(file.readRowGroup(group), file.getFileMetaData().getSchema());
      }
      if (columns != null) {
        for (; rowsToSkip > 0 && columns.left > 0; rowsToSkip--, rowsRead++) columns.next();
        for (int i = 0; i < ROWS_PER_CALL && columns.left > 0; i++) {
          output.collect(columns.next());
          rowsRead++;
        }
        if (columns.left > 0) return InputStatus.MORE_AVAILABLE;
        columns = null;
        group += parts;
        if (group < file.getRowGroups().size()) return InputStatus.MORE_AVAILABLE;
      }
      file.close();
      file = null;
      rowsRead = 0;
      bucket++;
      output.emitWatermark(new Watermark(epochMs + bucket * widthMs - 1));
      marks.write(bucket + " " + System.nanoTime() + "\n");
      marks.flush();
      return InputStatus.MORE_AVAILABLE;
    }

    private boolean open() throws IOException {
      Path path = Paths.get(folder, String.format("bucket-%06d.parquet", bucket));
      if (!Files.exists(path)) return false;
      if (marks == null) marks = new FileWriter(progress + "-" + part, true);
      file = ParquetFileReader.open(new LocalInputFile(path));
      group = part;
      return true;
    }

    @Override
    public List<Split> snapshotState(long checkpoint) {
      return part < 0 ? List.of() : List.of(new Split(part, parts, bucket, rowsRead + rowsToSkip));
    }

    @Override
    public CompletableFuture<Void> isAvailable() {
      return available;
    }

    @Override
    public void notifyNoMoreSplits() {}

    @Override
    public void close() throws IOException {
      timer.shutdownNow();
      if (file != null) file.close();
      if (marks != null) marks.close();
    }
  }

  /** The columns of a row group as rows. One row object is used for all of them. */
  private static final class Columns {
    long left;
    private final ColumnReader ts;
    private final ColumnReader src;
    private final ColumnReader bytes;
    private final Names names = new Names();
    private final BucketRow row = new BucketRow();

    Columns(PageReadStore pages, MessageType schema) {
      left = pages.getRowCount();
      GroupConverter converters = new GroupConverter() {
        @Override
        public Converter getConverter(int field) {
          return field == 1 ? names : new PrimitiveConverter() {};
        }

        @Override
        public void start() {}

        @Override
        public void end() {}
      };
      ColumnReadStoreImpl store = new ColumnReadStoreImpl(pages, converters, schema, "");
      ts = store.getColumnReader(schema.getColumns().get(0));
      src = store.getColumnReader(schema.getColumns().get(1));
      bytes = store.getColumnReader(schema.getColumns().get(2));
    }

    RowData next() {
      left--;
      row.setMs(Math.floorDiv(ts.getLong(), 1000L));
      src.writeCurrentValueToConverter();
      row.src = names.current;
      row.bytes = bytes.getLong();
      ts.consume();
      src.consume();
      bytes.consume();
      return row;
    }
  }

  /** Strings of the dictionary, built once for each row group. */
  private static final class Names extends PrimitiveConverter {
    BinaryStringData current;
    private BinaryStringData[] known;

    @Override
    public boolean hasDictionarySupport() {
      return true;
    }

    @Override
    public void setDictionary(Dictionary dictionary) {
      known = new BinaryStringData[dictionary.getMaxId() + 1];
      for (int id = 0; id < known.length; id++) {
        known[id] = BinaryStringData.fromBytes(dictionary.decodeToBinary(id).getBytes());
      }
    }

    @Override
    public void addValueFromDictionary(int id) {
      current = known[id];
    }

    @Override
    public void addBinary(Binary value) {
      current = BinaryStringData.fromBytes(value.getBytes());
    }
  }

  @Override
  public SimpleVersionedSerializer<Split> getSplitSerializer() {
    return new SimpleVersionedSerializer<Split>() {
      @Override
      public int getVersion() {
        return 1;
      }

      @Override
      public byte[] serialize(Split split) {
        return ByteBuffer.allocate(20).putInt(split.part).putInt(split.parts)
            .putInt(split.bucket).putLong(split.row).array();
      }

      @Override
      public Split deserialize(int version, byte[] data) {
        ByteBuffer in = ByteBuffer.wrap(data);
        return new Split(in.getInt(), in.getInt(), in.getInt(), in.getLong());
      }
    };
  }

  @Override
  public SimpleVersionedSerializer<Integer> getEnumeratorCheckpointSerializer() {
    return new SimpleVersionedSerializer<Integer>() {
      @Override
      public int getVersion() {
        return 1;
      }

      @Override
      public byte[] serialize(Integer state) {
        return new byte[0];
      }

      @Override
      public Integer deserialize(int version, byte[] data) {
        return 0;
      }
    };
  }
}
