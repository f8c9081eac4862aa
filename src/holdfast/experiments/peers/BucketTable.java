package peers;

import java.util.Set;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.configuration.ConfigOptions;
import org.apache.flink.configuration.ReadableConfig;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.ScanTableSource;
import org.apache.flink.table.connector.source.SourceProvider;
import org.apache.flink.table.connector.source.abilities.SupportsSourceWatermark;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.factories.FactoryUtil;

/** The connector 'buckets' of Flink SQL, with watermarks from the source. */
public class BucketTable implements DynamicTableSourceFactory {
  private static final ConfigOption<String> FOLDER =
      ConfigOptions.key("folder").stringType().noDefaultValue();
  private static final ConfigOption<String> PROGRESS =
      ConfigOptions.key("progress").stringType().noDefaultValue();
  private static final ConfigOption<Integer> BUCKETS =
      ConfigOptions.key("buckets").intType().noDefaultValue();
  private static final ConfigOption<Long> EPOCH_MS =
      ConfigOptions.key("epoch-ms").longType().noDefaultValue();
  private static final ConfigOption<Long> WIDTH_MS =
      ConfigOptions.key("width-ms").longType().noDefaultValue();

  @Override
  public String factoryIdentifier() {
    return "buckets";
  }

  @Override
  public Set<ConfigOption<?>> requiredOptions() {
    return Set.of(FOLDER, PROGRESS, BUCKETS, EPOCH_MS, WIDTH_MS);
  }

  @Override
  public Set<ConfigOption<?>> optionalOptions() {
    return Set.of();
  }

  @Override
  public DynamicTableSource createDynamicTableSource(Context context) {
    FactoryUtil.TableFactoryHelper helper = FactoryUtil.createTableFactoryHelper(this, context);
    helper.validate();
    ReadableConfig options = helper.getOptions();
    return new Scan(new BucketSource(options.get(FOLDER), options.get(PROGRESS),
        options.get(BUCKETS), options.get(EPOCH_MS), options.get(WIDTH_MS)));
  }

  private static final class Scan implements ScanTableSource, SupportsSourceWatermark {
    private final BucketSource source;

    Scan(BucketSource source) {
      this.source = source;
    }

    @Override
    public ChangelogMode getChangelogMode() {
      return ChangelogMode.insertOnly();
    }

    @Override
    public ScanRuntimeProvider getScanRuntimeProvider(ScanContext context) {
      return SourceProvider.of(source);
    }

    @Override
    public void applySourceWatermark() {}

    @Override
    public DynamicTableSource copy() {
      return new Scan(source);
    }

    @Override
    public String asSummaryString() {
      return "buckets";
    }
  }
}
