namespace py pinlater
namespace java com.pinterest.pinlater.thrift
namespace cpp pinterest.pinlater

const string CONTINUATION_START = "0"
const string CONTINUATION_END = "-1"

enum ErrorCode {
  CONTINUATION_INVALID = 400,
  PASSWORD_INVALID = 403,
  QUEUE_NAME_INVALID = 410,
  QUEUE_NAME_TOO_LONG = 411,
  QUEUE_NOT_FOUND = 413,
  PRIORITY_NOT_SUPPORTED = 416,
  DEQUEUE_RATE_LIMITED = 429,
  ENQUEUE_REJECTED = 430,
  UNKNOWN = 500,
  NO_HEALTHY_SHARDS = 501,
  SHARD_CONNECTION_FAILED = 502
}

enum PinLaterJobState {
  PENDING = 0,
  IN_PROGRESS = 1,
  SUCCEEDED = 2,
  FAILED = 3
}

exception PinLaterException {
  1: required ErrorCode errorCode
  2: required string message
  100: optional list<string> jobDescriptors
}

struct RequestContext {
  1: required string source
  2: optional string requestId = ""
}

struct PinLaterJob {
  1: required binary body
  2: optional byte priority = 1
  3: optional i64 runAfterTimestampMillis
  4: optional i32 numAttemptsAllowed = 2
  5: optional string customStatus = ""
  100: optional string key
  101: optional bool keyOfAllQueues
  102: optional i64 expiresAtTimestampMillis
  103: optional i64 runAfterTimestampMicros
  104: optional i64 expiresAtTimestampMicros
}

struct PinLaterEnqueueRequest {
  1: required string queueName
  2: required list<PinLaterJob> jobs
}

struct PinLaterEnqueueResponse {
  1: required list<string> jobDescriptors
  100: optional list<bool> existed
}

struct PinLaterJobAckInfo {
  1: required string jobDescriptor
  2: optional string appendCustomStatus = ""
  3: optional i64 retryDelayMillis = 0
  100: optional string claimDescriptor
  101: optional bool retryable
}

struct PinLaterJobAckRequest {
  1: required string queueName
  2: optional list<PinLaterJobAckInfo> jobsSucceeded
  3: optional list<PinLaterJobAckInfo> jobsFailed
}

struct PinLaterJobAckResponse {
  1: required list<bool> succeeded
  2: required list<bool> failed
}

struct PinLaterJobFinishInfo {
  1: required string jobDescriptor
  2: required PinLaterJobState jobState
  3: required i32 attemptsRemaining
  4: optional i32 expectedAttempts
  5: optional bool comparesPending = true
  6: optional i64 retryDelayMillis = 0
  7: optional string appendCustomStatus = ""
}

struct PinLaterFinishJobsRequest {
  1: required string queueName
  2: required list<PinLaterJobFinishInfo> finishes
}

enum PinLaterFinishOutcome {
  DONE = 0,
  NO_SUCH_JOB = 1,
  ENDED_BEFORE = 2,
  OTHER_ATTEMPTS = 3,
}

struct PinLaterFinishJobsResponse {
  1: required list<PinLaterFinishOutcome> outcomes
}

struct PinLaterDequeueRequest {
  1: required string queueName
  2: required i32 limit
  3: optional PinLaterJobAckRequest jobAckRequest
  4: optional bool dryRun = 0
  5: optional double coverage = 1.0
  100: optional i32 maxWaitMillis
  101: optional i32 claimTimeoutMillis
}

struct PinLaterDequeueMetadata {
  1: optional i32 attemptsAllowed
  2: optional i32 attemptsRemaining
  100: optional string claimDescriptor
  101: optional i32 claimTimeoutSeconds
}

struct PinLaterDequeueResponse {
  1: optional map<string, binary> jobs
  2: optional map<string, PinLaterDequeueMetadata> jobMetadata
}

struct PinLaterCheckpointJobRequest {
  1: required string jobDescriptor
  2: optional string newBody
  3: optional bool moveToPending = 0
  4: optional i64 runAfterTimestampMillis
  5: optional i32 numOfAttemptsAllowed
  6: optional string prependCustomStatus
  100: optional string claimDescriptor
}

struct PinLaterCheckpointJobsRequest {
  1: required string queueName
  2: required list<PinLaterCheckpointJobRequest> requests
  100: optional i32 claimTimeoutMillis
}

struct PinLaterCheckpointJobsResponse {
  1: required list<bool> applied
}

struct PinLaterJobKey {
  1: required string queueName
  2: required string key
}

struct PinLaterLookupJobRequest {
  1: required list<string> jobDescriptors
  2: optional bool includeBody = 0
  100: optional list<PinLaterJobKey> keys
}

struct PinLaterJobInfo {
  1: required string jobDescriptor
  2: required PinLaterJobState jobState
  10: required i32 attemptsAllowed
  3: required i32 attemptsRemaining
  4: required string customStatus
  5: required i64 createdAtTimestampMillis
  6: optional i64 runAfterTimestampMillis
  7: optional i64 updatedAtTimestampMillis
  8: optional string claimDescriptor
  9: optional binary body
  100: optional string key
  101: optional i64 expiresAtTimestampMillis
  102: optional string endReason
  103: optional bool keyOfAllQueues
  104: optional i64 runAfterTimestampMicros
  105: optional i64 expiresAtTimestampMicros
}

struct PinLaterGetJobCountRequest {
  1: required string queueName
  2: required PinLaterJobState jobState
  3: optional byte priority
  4: optional bool countFutureJobs = 0
  5: optional string bodyRegexToMatch
}

struct PinLaterScanJobsRequest {
  1: required string queueName
  2: required PinLaterJobState jobState
  3: optional byte priority
  4: optional bool scanFutureJobs = 0
  5: optional string continuation = CONTINUATION_START
  6: optional i32 limit = 100
  7: optional string bodyRegexToMatch
  100: optional bool newestEndFirst = 0
  101: optional i32 maxMillis
  102: optional i64 endedBeforeMillis
  103: optional i64 endedSinceMillis
  104: optional string statusRegexToMatch
  105: optional string message
  106: optional string place
  107: optional string worker
  108: optional bool acceptPartial = 0
}

struct PinLaterScanJobsResponse {
  1: required list<PinLaterJobInfo> scannedJobs
  2: optional string continuation = CONTINUATION_END
  100: optional i64 lookedAt
  101: optional i64 inState
  102: optional list<string> missingShards
}

struct PinLaterRetryFailedJobsRequest {
  1: required string queueName
  2: optional byte priority = 1
  3: optional i32 attemptsToAllow = 1
  4: optional i64 runAfterTimestampMillis
  5: optional i32 limit = 1000
  100: optional list<string> jobDescriptors
  101: optional string bodyRegexToMatch
  102: optional i64 endedBeforeMillis
  103: optional i64 spreadMillis
  104: optional bool dryRun = 0
  105: optional i64 endedSinceMillis
  106: optional string statusRegexToMatch
  107: optional string message
  108: optional string place
  109: optional string worker
}

struct PinLaterDeleteJobsRequest {
  1: required string queueName
  2: required PinLaterJobState jobState
  3: optional byte priority = 1
  4: optional string bodyRegexToMatch
  5: optional i32 limit = 1000
  100: optional list<string> jobDescriptors
  101: optional i64 endedBeforeMillis
  102: optional bool dryRun = 0
  103: optional i64 endedSinceMillis
  104: optional string statusRegexToMatch
  105: optional string message
  106: optional string place
  107: optional string worker
}

service PinLater {
  void createQueue(1: RequestContext context, 2: string name)
    throws (1: PinLaterException e)
  void deleteQueue(1: RequestContext context, 2: string name, 3: string password)
    throws (1: PinLaterException e)
  PinLaterEnqueueResponse enqueueJobs(1: RequestContext context, 2: PinLaterEnqueueRequest request)
    throws (1: PinLaterException e)
  PinLaterDequeueResponse dequeueJobs(1: RequestContext context, 2: PinLaterDequeueRequest request)
    throws (1: PinLaterException e)
  void ackDequeuedJobs(1: RequestContext context, 2: PinLaterJobAckRequest request)
    throws (1: PinLaterException e)
  PinLaterJobAckResponse ackJobs(1: RequestContext context, 2: PinLaterJobAckRequest request)
    throws (1: PinLaterException e)
  PinLaterFinishJobsResponse finishJobs(1: RequestContext context, 2: PinLaterFinishJobsRequest request)
    throws (1: PinLaterException e)

  void checkpointJobs(1: RequestContext context, 2: PinLaterCheckpointJobsRequest request)
    throws (1: PinLaterException e)
  PinLaterCheckpointJobsResponse applyCheckpoints(
      1: RequestContext context, 2: PinLaterCheckpointJobsRequest request)
    throws (1: PinLaterException e)
  map<string, PinLaterJobInfo> lookupJobs(
      1: RequestContext context, 2: PinLaterLookupJobRequest request)
    throws (1: PinLaterException e)
  i32 getJobCount(1: RequestContext context, 2: PinLaterGetJobCountRequest request)
    throws (1: PinLaterException e)
  set<string> getQueueNames(1: RequestContext context)
    throws (1: PinLaterException e)
  PinLaterScanJobsResponse scanJobs(1: RequestContext context, 2: PinLaterScanJobsRequest request)
    throws (1: PinLaterException e)
  i32 retryFailedJobs(1: RequestContext context, 2: PinLaterRetryFailedJobsRequest request)
    throws (1: PinLaterException e)
  i32 deleteJobs(1: RequestContext context, 2: PinLaterDeleteJobsRequest request)
    throws (1: PinLaterException e)
}
