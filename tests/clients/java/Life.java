// The whole life of a job, with Apache Thrift's own library for Java (Debian: libthrift-java).
//
//     thrift --gen java:generated_annotations=suppress -out gen thrift/pinlater.thrift
//     export CLASSPATH=gen:build:/usr/share/java/thrift.jar:/usr/share/java/slf4j-api.jar
//     javac -d build $(find gen -name '*.java') Life.java
//     java Life 9010 mail framed binary

import static java.nio.charset.StandardCharsets.UTF_8;

import com.pinterest.pinlater.thrift.*;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.apache.thrift.TException;
import org.apache.thrift.protocol.TBinaryProtocol;
import org.apache.thrift.protocol.TCompactProtocol;
import org.apache.thrift.protocol.TProtocol;
import org.apache.thrift.transport.TSocket;
import org.apache.thrift.transport.TTransport;
import org.apache.thrift.transport.layered.TFramedTransport;

public class Life {
  static String hex(ByteBuffer body) {
    byte[] bytes = new byte[body.remaining()];
    body.duplicate().get(bytes);
    return HexFormat.of().formatHex(bytes);
  }

  public static void main(String[] args) throws TException {
    TTransport socket = new TSocket("127.0.0.1", Integer.parseInt(args[0]));
    TTransport transport = args[2].equals("framed") ? new TFramedTransport(socket) : socket;
    TProtocol protocol =
        args[3].equals("compact") ? new TCompactProtocol(transport) : new TBinaryProtocol(transport);
    transport.open();
    live(new PinLater.Client(protocol), args[1], new PrintStream(System.out, true, UTF_8));
    transport.close();
  }

  static void live(PinLater.Client service, String queue, PrintStream out) throws TException {
    RequestContext me = new RequestContext("life:java");
    service.createQueue(me, queue);
    out.println(service.getQueueNames(me).contains(queue) ? "created" : "missing");

    List<PinLaterJob> jobs =
        List.of(
            new PinLaterJob(ByteBuffer.wrap(new byte[] {0x00, (byte) 0xff, 0x0a, (byte) 0x80})),
            new PinLaterJob(ByteBuffer.wrap("grüße, 世界".getBytes(UTF_8)))
                .setNumAttemptsAllowed(5)
                .setCustomStatus("né; "),
            new PinLaterJob(ByteBuffer.wrap("step 1".getBytes(UTF_8))).setPriority((byte) 3));
    List<String> descriptors =
        service.enqueueJobs(me, new PinLaterEnqueueRequest(queue, jobs)).getJobDescriptors();
    String raw = descriptors.get(0);
    String text = descriptors.get(1);
    String steps = descriptors.get(2);

    PinLaterDequeueRequest dequeue = new PinLaterDequeueRequest(queue, 10);
    PinLaterDequeueResponse claimed = service.dequeueJobs(me, dequeue);
    for (String descriptor : descriptors) {
      PinLaterDequeueMetadata about = claimed.getJobMetadata().get(descriptor);
      out.printf(
          "claimed %s %d of %d attempts %d s%n",
          hex(claimed.getJobs().get(descriptor)),
          about.getAttemptsRemaining(),
          about.getAttemptsAllowed(),
          about.getClaimTimeoutSeconds());
    }

    // Acks and checkpoints name the claim: they apply only as long as it holds.
    Map<String, PinLaterDequeueMetadata> claims = claimed.getJobMetadata();
    PinLaterJobAckInfo done =
        new PinLaterJobAckInfo(raw)
            .setAppendCustomStatus("sent ✓")
            .setClaimDescriptor(claims.get(raw).getClaimDescriptor());
    PinLaterJobAckInfo inAnHour =
        new PinLaterJobAckInfo(text)
            .setAppendCustomStatus("später")
            .setRetryDelayMillis(3_600_000L)
            .setClaimDescriptor(claims.get(text).getClaimDescriptor());
    service.ackDequeuedJobs(
        me,
        new PinLaterJobAckRequest(queue)
            .setJobsSucceeded(List.of(done))
            .setJobsFailed(List.of(inAnHour)));

    // The third job saves how far it got, and goes back to the queue.
    PinLaterCheckpointJobRequest saved =
        new PinLaterCheckpointJobRequest(steps)
            .setNewBody("step 2")
            .setMoveToPending(true)
            .setPrependCustomStatus("½")
            .setClaimDescriptor(claims.get(steps).getClaimDescriptor());
    service.checkpointJobs(me, new PinLaterCheckpointJobsRequest(queue, List.of(saved)));
    ByteBuffer again = service.dequeueJobs(me, dequeue).getJobs().get(steps);
    out.println("claimed again " + UTF_8.decode(again));
    service.ackDequeuedJobs(
        me,
        new PinLaterJobAckRequest(queue)
            .setJobsSucceeded(List.of(new PinLaterJobAckInfo(steps))));

    PinLaterLookupJobRequest lookup = new PinLaterLookupJobRequest(descriptors).setIncludeBody(true);
    Map<String, PinLaterJobInfo> found = service.lookupJobs(me, lookup);
    for (String descriptor : descriptors) {
      PinLaterJobInfo info = found.get(descriptor);
      out.printf(
          "found %s %d left %s %s%n",
          info.getJobState(),
          info.getAttemptsRemaining(),
          hex(info.bufferForBody()),
          info.getCustomStatus());
    }
    PinLaterJobInfo delayed = found.get(text);
    long delay = delayed.getRunAfterTimestampMillis() - delayed.getUpdatedAtTimestampMillis();
    out.println("delayed " + delay + " ms");

    int scanned = 0;
    PinLaterScanJobsRequest scan =
        new PinLaterScanJobsRequest(queue, PinLaterJobState.SUCCEEDED).setLimit(1);
    while (!scan.getContinuation().equals(pinlaterConstants.CONTINUATION_END)) {
      PinLaterScanJobsResponse page = service.scanJobs(me, scan);
      scanned += page.getScannedJobsSize();
      scan.setContinuation(page.getContinuation());
    }
    out.println("scanned " + scanned);

    PinLaterGetJobCountRequest later =
        new PinLaterGetJobCountRequest(queue, PinLaterJobState.PENDING).setCountFutureJobs(true);
    out.println("counted " + service.getJobCount(me, later));

    try {
      service.enqueueJobs(me, new PinLaterEnqueueRequest("nowhere", jobs));
    } catch (PinLaterException error) {
      out.println("refused " + error.getErrorCode().getValue() + " " + error.getMessage());
    }
    try {
      service.deleteQueue(me, queue, "a wrong password");
    } catch (PinLaterException error) {
      out.println("refused " + error.getErrorCode().getValue() + " " + error.getMessage());
    }
  }
}
