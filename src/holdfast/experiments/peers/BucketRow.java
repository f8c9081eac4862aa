package peers;

import org.apache.flink.table.data.ArrayData;
import org.apache.flink.table.data.DecimalData;
import org.apache.flink.table.data.MapData;
import org.apache.flink.table.data.RawValueData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.data.binary.BinaryStringData;
import org.apache.flink.types.RowKind;
import org.apache.flink.types.variant.Variant;

/** A row (ts, src, bytes) without boxed values, reused for all rows of a reader. */
final class BucketRow implements RowData {
  BinaryStringData src;
  long bytes;
  private TimestampData ts = TimestampData.fromEpochMillis(0);

  /** Rows are in time order, so most have the millisecond of the row before. */
  void setMs(long ms) {
    if (ts.getMillisecond() != ms) ts = TimestampData.fromEpochMillis(ms);
  }

  @Override
  public int getArity() {
    return 3;
  }

  @Override
  public RowKind getRowKind() {
    return RowKind.INSERT;
  }

  @Override
  public void setRowKind(RowKind kind) {}

  @Override
  public boolean isNullAt(int field) {
    return false;
  }

  @Override
  public TimestampData getTimestamp(int field, int precision) {
    return ts;
  }

  @Override
  public StringData getString(int field) {
    return src;
  }

  @Override
  public long getLong(int field) {
    return bytes;
  }

  @Override
  public boolean getBoolean(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public byte getByte(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public short getShort(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public int getInt(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public float getFloat(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public double getDouble(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public DecimalData getDecimal(int field, int precision, int scale) {
    throw new UnsupportedOperationException();
  }

  @Override
  public <T> RawValueData<T> getRawValue(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public byte[] getBinary(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public ArrayData getArray(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public MapData getMap(int field) {
    throw new UnsupportedOperationException();
  }

  @Override
  public RowData getRow(int field, int fields) {
    throw new UnsupportedOperationException();
  }

  @Override
  public Variant getVariant(int field) {
    throw new UnsupportedOperationException();
  }
}
