// The whole life of a job, with Apache Thrift's own library for C++ (Debian: libthrift-dev and
// libboost-dev).
//
//     thrift --gen cpp:no_skeleton -out gen thrift/pinlater.thrift
//     g++ -std=c++17 -I gen -o life life.cpp gen/*.cpp -lthrift
//     ./life 9010 mail framed binary

#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include <thrift/protocol/TBinaryProtocol.h>
#include <thrift/protocol/TCompactProtocol.h>
#include <thrift/transport/TBufferTransports.h>
#include <thrift/transport/TSocket.h>

#include "PinLater.h"
#include "pinlater_constants.h"

using namespace apache::thrift::protocol;
using namespace apache::thrift::transport;
using namespace pinterest::pinlater;
using std::cout;
using std::string;

static string hex(const string& body) {
  std::ostringstream out;
  out << std::hex << std::setfill('0');
  for (unsigned char byte : body) out << std::setw(2) << static_cast<int>(byte);
  return out.str();
}

static PinLaterJob job(const string& body) {
  PinLaterJob job;
  job.body = body;
  return job;
}

static PinLaterJobAckInfo ack(const string& descriptor) {
  PinLaterJobAckInfo info;
  info.jobDescriptor = descriptor;
  return info;
}

static std::shared_ptr<TProtocol> connect(int port, const string& framing, const string& encoding) {
  std::shared_ptr<TTransport> transport = std::make_shared<TSocket>("127.0.0.1", port);
  if (framing == "framed") transport = std::make_shared<TFramedTransport>(transport);
  else transport = std::make_shared<TBufferedTransport>(transport);
  transport->open();
  if (encoding == "compact") return std::make_shared<TCompactProtocol>(transport);
  return std::make_shared<TBinaryProtocol>(transport);
}

static void live(PinLaterClient& service, const string& queue) {
  RequestContext me;
  me.source = "life:cpp";
  service.createQueue(me, queue);
  std::set<string> queues;
  service.getQueueNames(queues, me);
  cout << (queues.count(queue) ? "created\n" : "missing\n");

  PinLaterEnqueueRequest enqueue;
  enqueue.queueName = queue;
  enqueue.jobs = {job(string("\x00\xff\x0a\x80", 4)), job("grüße, 世界"), job("step 1")};
  enqueue.jobs[1].__set_numAttemptsAllowed(5);
  enqueue.jobs[1].__set_customStatus("né; ");
  enqueue.jobs[2].__set_priority(3);
  PinLaterEnqueueResponse enqueued;
  service.enqueueJobs(enqueued, me, enqueue);
  const auto& descriptors = enqueued.jobDescriptors;
  const string &raw = descriptors[0], &text = descriptors[1], &steps = descriptors[2];

  PinLaterDequeueRequest dequeue;
  dequeue.queueName = queue;
  dequeue.limit = 10;
  PinLaterDequeueResponse claimed;
  service.dequeueJobs(claimed, me, dequeue);
  for (const string& descriptor : descriptors) {
    const PinLaterDequeueMetadata& about = claimed.jobMetadata[descriptor];
    cout << "claimed " << hex(claimed.jobs[descriptor]) << ' ' << about.attemptsRemaining << " of "
         << about.attemptsAllowed << " attempts " << about.claimTimeoutSeconds << " s\n";
  }

  // Acks and checkpoints name the claim: they apply only as long as it holds.
  PinLaterJobAckInfo done = ack(raw), in_an_hour = ack(text);
  done.__set_appendCustomStatus("sent ✓");
  done.__set_claimDescriptor(claimed.jobMetadata[raw].claimDescriptor);
  in_an_hour.__set_appendCustomStatus("später");
  in_an_hour.__set_retryDelayMillis(3'600'000);
  in_an_hour.__set_claimDescriptor(claimed.jobMetadata[text].claimDescriptor);
  PinLaterJobAckRequest acks;
  acks.queueName = queue;
  acks.__set_jobsSucceeded({done});
  acks.__set_jobsFailed({in_an_hour});
  service.ackDequeuedJobs(me, acks);

  // The third job saves how far it got, and goes back to the queue.
  PinLaterCheckpointJobRequest saved;
  saved.jobDescriptor = steps;
  saved.__set_newBody("step 2");
  saved.__set_moveToPending(true);
  saved.__set_prependCustomStatus("½");
  saved.__set_claimDescriptor(claimed.jobMetadata[steps].claimDescriptor);
  PinLaterCheckpointJobsRequest checkpoint;
  checkpoint.queueName = queue;
  checkpoint.requests = {saved};
  service.checkpointJobs(me, checkpoint);
  PinLaterDequeueResponse again;
  service.dequeueJobs(again, me, dequeue);
  cout << "claimed again " << again.jobs[steps] << '\n';
  PinLaterJobAckRequest last;
  last.queueName = queue;
  last.__set_jobsSucceeded({ack(steps)});
  service.ackDequeuedJobs(me, last);

  PinLaterLookupJobRequest lookup;
  lookup.jobDescriptors = descriptors;
  lookup.__set_includeBody(true);
  std::map<string, PinLaterJobInfo> found;
  service.lookupJobs(found, me, lookup);
  for (const string& descriptor : descriptors) {
    const PinLaterJobInfo& info = found[descriptor];
    cout << "found " << to_string(info.jobState) << ' ' << info.attemptsRemaining << " left "
         << hex(info.body) << ' ' << info.customStatus << '\n';
  }
  const PinLaterJobInfo& delayed = found[text];
  cout << "delayed " << delayed.runAfterTimestampMillis - delayed.updatedAtTimestampMillis
       << " ms\n";

  PinLaterScanJobsRequest scan;
  scan.queueName = queue;
  scan.jobState = PinLaterJobState::SUCCEEDED;
  scan.__set_limit(1);
  scan.__set_continuation(g_pinlater_constants.CONTINUATION_START);
  size_t scanned = 0;
  while (scan.continuation != g_pinlater_constants.CONTINUATION_END) {
    PinLaterScanJobsResponse page;
    service.scanJobs(page, me, scan);
    scanned += page.scannedJobs.size();
    scan.__set_continuation(page.continuation);
  }
  cout << "scanned " << scanned << '\n';

  PinLaterGetJobCountRequest later;
  later.queueName = queue;
  later.jobState = PinLaterJobState::PENDING;
  later.__set_countFutureJobs(true);
  cout << "counted " << service.getJobCount(me, later) << '\n';

  try {
    enqueue.queueName = "nowhere";
    service.enqueueJobs(enqueued, me, enqueue);
  } catch (const PinLaterException& error) {
    cout << "refused " << static_cast<int>(error.errorCode) << ' ' << error.message << '\n';
  }
  try {
    service.deleteQueue(me, queue, "a wrong password");
  } catch (const PinLaterException& error) {
    cout << "refused " << static_cast<int>(error.errorCode) << ' ' << error.message << '\n';
  }
}

int main(int, char** argv) {
  const auto protocol = connect(std::stoi(argv[1]), argv[3], argv[4]);
  PinLaterClient service(protocol);
  live(service, argv[2]);
  protocol->getTransport()->close();
}
