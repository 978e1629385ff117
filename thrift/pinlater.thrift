/*
 * The interface of PinLater, an asynchronous job service, as pinlaterd serves it.
 *
 * This file is the protocol document: clients in any language may rely on it. It is compatible
 * with the interface that Pinterest published in 2015: clients generated from that one work
 * unchanged. pinlaterd adds only optional fields with ids from 100 up, which old clients and old
 * servers skip.
 *
 *
 * 1. TERMS
 *
 * A JOB is an opaque body (bytes) with a priority (1 is the highest), a run-after time
 * (milliseconds since the epoch), a number of attempts allowed and remaining, and a custom status
 * (text). A QUEUE is a named set of jobs. It exists on every SHARD, a partition of the storage; a
 * job lives in one shard for its whole life. A shard is enqueueable if it is healthy and not
 * set to dequeue-only.
 *
 * A JOB DESCRIPTOR names a job for ever: it is never used for a second one.
 *
 *     QUEUE:sSHARD:pPRIORITY:LOCALID         mail:s1d2:p1:1763776800004711
 *
 * A dequeue makes a CLAIM on a job. Its CLAIM DESCRIPTOR names the claimer and is unique. START
 * is when the owner of the shard took it over, in milliseconds.
 *
 *     HOST:PORT:START:SOURCE:COUNTER         jobs1:9010:1700000000000:mailer:web7:12
 *
 * SOURCE is the caller's name, from RequestContext, typically `service:host`.
 *
 *
 * 2. THE LIFE OF A JOB
 *
 *   enqueueJobs
 *       |              checkpointJobs with moveToPending
 *       |              ack failed, more than one attempt remaining
 *       |              time-out of the claim, more than one attempt remaining
 *       |              dequeue's answer could not be delivered
 *       v            .-----------------------------------------------.
 *   +---------+ <----'                                        +------+------+
 *   | PENDING |--------------- dequeueJobs ------------------>| IN_PROGRESS |--. checkpointJobs
 *   +---------+     (run-after has come; a claim begins)      +------+------+<-' (same claim)
 *       ^                                                        |       |
 *       |                      ack failed, last attempt          |       | ack succeeded
 *       |                      time-out, last attempt            |       |
 *       |                  +--------+                            |       v
 *       '-- retryFailed ---| FAILED |<---------------------------'   +-----------+
 *               Jobs       +--------+                                | SUCCEEDED |
 *                              | 168 hours, or deleteJobs            +-----------+
 *                              v                                         | 24 hours,
 *                             gone                                      gone, or deleteJobs
 *
 *   deleteJobs deletes jobs of any state. A claim ends by ack, moveToPending, time-out or
 *   deletion. Attempts remaining go down by one at a failed ack and at a time-out, to 0 in
 *   FAILED; an answer that could not be delivered costs none. SUCCEEDED and FAILED jobs keep
 *   their last claim descriptor as a record; on the way back to PENDING it is cleared.
 *
 *
 * 3. PROMISES
 *
 * At least once: a job whose enqueue was answered is kept until it succeeded, failed for good, was
 * deleted, or its time to live ended, whatever process or machine died. A job may run twice, if its
 * claim timed out or its ack was lost; so workers should be idempotent, or name the claim
 * descriptor in each ack and checkpoint, which then apply only while that claim holds. No job has
 * two live claims.
 *
 * A call that begins after an enqueue, ack, checkpoint, retry or delete was answered, on any
 * connection or router, sees its effect. A short or empty dequeue answer is given only after every
 * covered healthy shard confirmed it.
 *
 * A shard that is down affects its own jobs only. Enqueue and dequeue avoid it; createQueue
 * succeeds on the healthy ones, and the others catch up before they serve. deleteQueue, counts,
 * scans (unless they accept a part), retries and deletes over all shards, and look-ups and acks of jobs of its own, are
 * SHARD_CONNECTION_FAILED meanwhile, with the shards' names, and may be repeated. For its first
 * seconds (the server's shard_restart_grace_ms) they wait for it instead, and so do enqueues and
 * dequeues if there is no other shard: a restart of a shard costs time, but no error.
 *
 *
 * 4. TRANSPORT
 *
 * TCP, by default on port 9010. Framed (a 4-byte length before each message) TBinaryProtocol,
 * strict or not; on the same port, told apart by their first bytes, also unframed strict
 * TBinaryProtocol and framed TCompactProtocol. One connection keeps to one form, and is answered in
 * it.
 *
 * Calls of a connection may be pipelined: sent before earlier ones are answered. They are
 * answered in their order. A call is answered within request_timeout_ms, plus its maxWaitMillis.
 * A `oneway` call gets no answer, and its maxWaitMillis is ignored. An unknown method gets a
 * TApplicationException (unknown method) and the connection stays usable. Bytes that are no Thrift
 * message close the connection.
 *
 * All text is UTF-8; text that is not is an invalid request. Bodies, `newBody` among them, are raw
 * bytes whatever type they are declared with.
 *
 *
 * 5. LIMITS
 *
 * Those with a name are settings of etc/pinlaterd.yaml; the value is the default.
 *
 *   queue name                     [A-Za-z0-9_]+, at most 64 characters, fewer on MySQL, where
 *                                  plq_SHARD_QUEUE must fit into 64
 *   shard name                     [A-Za-z0-9-]{1,16}
 *   num_priority_levels            3: priorities 1 (highest) to 3; at most 127
 *   max_job_body_bytes             1 MiB a body, less where a shard's table holds less
 *   source                         120 bytes of printable text (no controls, ends of lines, or changes
 *                                  of direction), in enqueues, dequeues and checkpoints; else the
 *                                  call is an invalid request
 *   custom status                  5,000 characters on MySQL and SQLite, where appends are added;
 *                                  3,000 on Redis, where an append replaces. Cut at the end
 *   enqueue_split_jobs             1,000 jobs of one enqueue are stored all or none; a larger
 *                                  one is divided over shards, each part all or none; if not all
 *                                  parts are stored, PinLaterException.jobDescriptors says which
 *   max_jobs_per_call              10,000 elements of a list: the jobs of an enqueue, acks (succeeded,
 *                                  failed), checkpoints, descriptors of a look-up. A call with a longer
 *                                  list is an invalid request: refused whole, before it is decoded
 *   bad descriptors                named in an error's message up to 16 KiB, each up to 200 characters;
 *                                  beyond, the message says how many more there are
 *   max_frame_bytes                64 MiB a message, of compact as binary, too; beyond, the
 *                                  connection is closed. A look-up whose answer would be longer is
 *                                  an invalid request
 *   TCompactProtocol               1,000,000 values (fields, elements) a message, 1,000 fields
 *                                  a struct; beyond, the connection is closed
 *   max_response_bytes             32 MiB; a dequeue's answer stops growing there, or earlier while
 *                                  many or unread answers take the server's memory; it has a job at least
 *   request_timeout_ms             10,000 until a call is answered
 *   max_dequeue_wait_ms            30,000; a longer maxWaitMillis is cut to it
 *   job_claimed_timeout_seconds    600 from the claim, or its last checkpoint, to its time-out
 *   job_succeeded_ttl_hours        24 until a SUCCEEDED job is deleted
 *   job_failed_ttl_hours           168 until a FAILED job is deleted
 *   count_limit                    100,000 jobs counted for each shard and priority
 *   scan_limit                     10,000 jobs in one answer of scanJobs
 *   searches                       64 at a time in a shard (counts, scans, deletes with a pattern),
 *                                  32 of one source; beyond, UNKNOWN `overloaded`
 *   bulk calls                     1,000 at a time in a shard (look-ups, searches, retries, deletes),
 *                                  and 1,000 dry runs; beyond, UNKNOWN `overloaded`
 *   bodyRegexToMatch               10,000 characters; a longer pattern is an invalid request
 *                                  its instructions (of RE2) times the bytes of a body: 500,000,000; a search
 *                                  that comes to a longer body is an invalid request
 *   max_connections                10,000 to one router; beyond, they are closed at once
 *   max_calls_per_connection       1,000 pipelined calls in flight: 33 on a new connection, then
 *                                  1 + as many answers like the last ones as 8 MiB hold; beyond, the
 *                                  router reads no more until it has answered some
 *   max_calls_in_flight            20,000 in one router; beyond, calls are rejected (`overloaded`).
 *                                  Dequeues that wait (maxWaitMillis) do not count
 *   max_waiting_dequeues           20,000 in one router; beyond, a dequeue that would wait is
 *                                  rejected (`overloaded`); its acks have been carried out
 *   max_waiting_per_connection     100 pipelined dequeues; beyond, no call behind them is begun
 *                                  until one of them has ended
 *   max_buffered_bytes             256 MiB of unfinished messages and unread answers in one router;
 *                                  look-ups, scans and dry runs whose answers may be large begin once
 *                                  the answers before them are read, and a quarter of this has room,
 *                                  and are rejected (`overloaded`) if their time is up before;
 *                                  above half of it, connections whose message lacks the most
 *                                  wait, and those that could send but do not for 2 seconds are
 *                                  closed
 *   jobs per second and queue      etc/queues.yaml; see DEQUEUE_RATE_LIMITED
 *
 * A connection whose unfinished frame or unread answer makes no progress for three times
 * request_timeout_ms is closed. An idle one, between calls, is kept.
 *
 * The settings of time-out and time to live may be set for each queue in etc/queues.yaml.
 *
 *
 * 6. ERRORS
 *
 * Every error of the service is a PinLaterException. ErrorCode describes each, with the
 * cure. The message is for people; only two of its beginnings are part of this contract:
 *
 *     `invalid request: `   the request itself is wrong: the message says what, where, and
 *                           what is allowed. Repeating it changes nothing
 *     `overloaded: `        a bounded queue within the service, or a store, is full. No job was
 *                           stored or claimed. Repeat it later, with growing pauses. May have been
 *                           carried out: acks along with a dequeue (see jobAckRequest), and a part
 *                           of retryFailedJobs and deleteJobs, on other shards
 */

namespace py pinlater
namespace java com.pinterest.pinlater.thrift
namespace cpp pinterest.pinlater

// Where a scan begins.
const string CONTINUATION_START = "0"
// Nothing is left to scan.
const string CONTINUATION_END = "-1"

/**
 * Why a call failed, and the cure. No code is ever added: generated clients in some languages
 * cannot read a message with an unknown code.
 *
 * 4xx: the request; repeating it as it is changes nothing, but for 429, and 430 `overloaded: `.
 * 5xx: the service; it may be repeated, with growing pauses.
 */
enum ErrorCode {
  /** The scan's continuation is not one that scanJobs returned. Begin again at
      CONTINUATION_START. */
  CONTINUATION_INVALID = 400,

  /** deleteQueue: not the admin password, or the server has none set. Nothing was deleted. */
  PASSWORD_INVALID = 403,

  /** The queue's name is not [A-Za-z0-9_]+. Choose another. */
  QUEUE_NAME_INVALID = 410,

  /** The queue's name is longer than the shards can hold; the message says by how much. No shard
      has created it. Choose a shorter one. */
  QUEUE_NAME_TOO_LONG = 411,

  /** No healthy shard has a queue of that name. Call createQueue first. */
  QUEUE_NOT_FOUND = 413,

  /** The priority is not among 1 to num_priority_levels. Nothing was stored. */
  PRIORITY_NOT_SUPPORTED = 416,

  /** The queue's jobs per second are used up: not one job was granted. The acks of the call were
      carried out. Wait, or use maxWaitMillis. */
  DEQUEUE_RATE_LIMITED = 429,

  /** Nothing was stored: the request is invalid (`invalid request: `; attempts below 1, a
      body or source too long, a run-after that the store cannot hold, text that is not
      UTF-8), or all shards are dequeue-only, or the service is full (`overloaded: `). */
  ENQUEUE_REJECTED = 430,

  /** Every other error. `invalid request: `: correct the request; `overloaded: `: repeat it later;
      acks with bad descriptors: the message names them, the others were carried out. */
  UNKNOWN = 500,

  /** No shard is healthy. Nothing was done. Repeat it later. */
  NO_HEALTHY_SHARDS = 501,

  /** A required shard is down, or failed during the call: the outcome there is unknown. The message
      names it. Acks, checkpoints, look-ups, counts and scans can be repeated safely, and enqueues of
      jobs with keys; any other repeated enqueue may store the job twice. */
  SHARD_CONNECTION_FAILED = 502
}

/** The states of a job; see 2, the life of a job. */
enum PinLaterJobState {
  /** Waits for its run-after time, or for a worker. */
  PENDING = 0,
  /** Claimed by a worker. */
  IN_PROGRESS = 1,
  /** Done. */
  SUCCEEDED = 2,
  /** No attempts remain. */
  FAILED = 3
}

/** The error of every method. */
exception PinLaterException {
  1: required ErrorCode errorCode
  /** For people; see 6, errors. */
  2: required string message
  /** SHARD_CONNECTION_FAILED of an enqueue of more than enqueue_split_jobs, of which not all jobs are
      stored, though some are or may be; else it is not sent. One for each job, in their order: its
      descriptor if it is stored, "" if it certainly is not, "?" if that is not known. Jobs of "" may
      be enqueued again; repeating the whole call would store the others twice. */
  100: optional list<string> jobDescriptors
}

/** The caller. */
struct RequestContext {
  /** The caller's name, typically `service:host`. It becomes part of claim descriptors, and a
      checkpoint without claim descriptor applies only to jobs claimed by the same source. */
  1: required string source
  /** For the caller's own tracing; not interpreted. */
  2: optional string requestId = ""
}

/** A job as it is enqueued. */
struct PinLaterJob {
  /** Opaque; at most max_job_body_bytes. */
  1: required binary body
  /** 1 is the highest; up to num_priority_levels. If it is not sent: the queue's
      default_priority, or 1. */
  2: optional byte priority = 1
  /** When it may run at the earliest, in milliseconds since the epoch; default: now. */
  3: optional i64 runAfterTimestampMillis
  /** How often it may run in all; at least 1. If it is not sent: the queue's default_attempts,
      or 2. */
  4: optional i32 numAttemptsAllowed = 2
  /** A text for people, which acks and checkpoints extend. */
  5: optional string customStatus = ""
  /** 1 to 200 bytes. At most one job of the queue holds a key, as long as it is kept, in whatever
      state. A job whose key is held is not stored: the answer names the holder. So a caller that does
      not know what became of an enqueue repeats it. */
  100: optional string key
  /** The key is held once in all queues of the service together, apart from those of single queues. The
      holder may be of another queue. */
  101: optional bool keyOfAllQueues
  /** From then on the job is not handed out any more. It is FAILED, with `expired` as the end of its
      custom status and as its endReason, once a dequeue or maintenance finds it. A run that has begun
      goes on; a retry meets the expiry again. */
  102: optional i64 expiresAtTimestampMillis
  /** Run-after and expiry in microseconds. They are kept with the job and returned by look-ups, and
      have no effect: the fields in milliseconds say when. */
  103: optional i64 runAfterTimestampMicros
  104: optional i64 expiresAtTimestampMicros
}

struct PinLaterEnqueueRequest {
  1: required string queueName
  /** May be empty; the answer is empty then. */
  2: required list<PinLaterJob> jobs
}

struct PinLaterEnqueueResponse {
  /** In the order of the jobs. */
  1: required list<string> jobDescriptors
  /** Of each job, whether it was there before this call, under its key. Sent if any has a key. */
  100: optional list<bool> existed
}

/** The end of one job's run. */
struct PinLaterJobAckInfo {
  1: required string jobDescriptor
  /** Appended to the custom status (Redis: replaces it). */
  2: optional string appendCustomStatus = ""
  /** Failed jobs only: how long the next attempt waits, from now. */
  3: optional i64 retryDelayMillis = 0
  /** As the dequeue gave it. If given, the ack applies only while that very claim holds: a
      worker whose claim timed out cannot end a job that another worker now runs. */
  100: optional string claimDescriptor
  /** Failed jobs only: false fails the job for good, whatever attempts remain. */
  101: optional bool retryable
}

struct PinLaterJobAckRequest {
  /** All jobs are of this queue. */
  1: required string queueName
  2: optional list<PinLaterJobAckInfo> jobsSucceeded
  3: optional list<PinLaterJobAckInfo> jobsFailed
}

/** What became of each job of ackJobs, in the order of the request's lists: true if the ack applied;
    false if the job was not IN_PROGRESS, or its given claim no longer held, so nothing changed. */
struct PinLaterJobAckResponse {
  1: required list<bool> succeeded
  2: required list<bool> failed
}

/** How a job ends that is PENDING or IN_PROGRESS, claimed or not. */
struct PinLaterJobFinishInfo {
  1: required string jobDescriptor
  /** SUCCEEDED, FAILED, or PENDING: it is tried again, after retryDelayMillis. */
  2: required PinLaterJobState jobState
  /** Which remain from then on; at least 1 for PENDING. */
  3: required i32 attemptsRemaining
  /** If given, it applies only while so many attempts remain. */
  4: optional i32 expectedAttempts
  /** False: that counts only if the job is IN_PROGRESS. */
  5: optional bool comparesPending = true
  6: optional i64 retryDelayMillis = 0
  /** Appended to the custom status (Redis: replaces it). */
  7: optional string appendCustomStatus = ""
}

struct PinLaterFinishJobsRequest {
  /** All jobs are of this queue. */
  1: required string queueName
  2: required list<PinLaterJobFinishInfo> finishes
}

/** Nothing has changed unless it is DONE. */
enum PinLaterFinishOutcome {
  DONE = 0,
  NO_SUCH_JOB = 1,
  /** The job is SUCCEEDED or FAILED. */
  ENDED_BEFORE = 2,
  /** Not as many attempts remain as were expected. */
  OTHER_ATTEMPTS = 3,
}

struct PinLaterFinishJobsResponse {
  /** In the order of the request. */
  1: required list<PinLaterFinishOutcome> outcomes
}

struct PinLaterDequeueRequest {
  1: required string queueName
  /** Maximum number of jobs; at least 1. */
  2: required i32 limit
  /** Carried out first, whatever the outcome of the dequeue: also if it is invalid, refused or finds
      nothing. Its queue may be another one. Not carried out if the whole call is refused before it
      is read: more than max_calls_in_flight calls are in progress, or a dry run has found no memory
      for its answer within its time (`overloaded: `), or a list has more than max_jobs_per_call acks
      or is malformed (`invalid request: `). */
  3: optional PinLaterJobAckRequest jobAckRequest
  /** Return the jobs that a dequeue would claim, and claim none. Not rate limited. */
  4: optional bool dryRun = 0
  /** The part of the shards to look at: max(1, round(coverage * shards)) of them, chosen at
      random. Above 0, at most 1. */
  5: optional double coverage = 1.0
  /** Long poll: with no job ready, or no rate token left, the answer waits up to this long for one,
      at most max_dequeue_wait_ms. */
  100: optional i32 maxWaitMillis
  /** How long the claims of this dequeue last, unless checkpoints renew them, at least 1,000; at most
      as long as the queue says, which is the default. After a restart of the shard that gave it, a
      claim lasts as long as the queue says until a checkpoint with a claimTimeoutMillis renews it. */
  101: optional i32 claimTimeoutMillis
}

struct PinLaterDequeueMetadata {
  1: optional i32 attemptsAllowed
  /** With the attempt that now begins. */
  2: optional i32 attemptsRemaining
  /** The claim, to be named in acks and checkpoints. Always sent; empty in a dry run. */
  100: optional string claimDescriptor
  /** Seconds until the claim ends, unless a checkpoint renews it. Always sent. */
  101: optional i32 claimTimeoutSeconds
}

struct PinLaterDequeueResponse {
  /** Bodies by job descriptor. */
  1: optional map<string, binary> jobs
  /** The same jobs' metadata. */
  2: optional map<string, PinLaterDequeueMetadata> jobMetadata
}

/** Changes to a job that the caller runs. Absent fields change nothing. */
struct PinLaterCheckpointJobRequest {
  1: required string jobDescriptor
  /** Raw bytes, although declared a string. */
  2: optional string newBody
  /** End the claim, back to PENDING, at no attempt's cost. */
  3: optional bool moveToPending = 0
  /** Default: now. */
  4: optional i64 runAfterTimestampMillis
  /** Becomes both attempts allowed and attempts remaining. */
  5: optional i32 numOfAttemptsAllowed
  /** Put in front of the custom status. */
  6: optional string prependCustomStatus
  /** As the dequeue gave it. If given, the checkpoint applies only while that very claim holds;
      else the claim's source must equal the context's source. */
  100: optional string claimDescriptor
}

struct PinLaterCheckpointJobsRequest {
  /** All jobs are of this queue. */
  1: required string queueName
  2: required list<PinLaterCheckpointJobRequest> requests
  /** How long the claims last from now on, as in a dequeue; by default as long again as before. */
  100: optional i32 claimTimeoutMillis
}

/** Whether each checkpoint of applyCheckpoints applied, in their order; false if the job was not
    IN_PROGRESS, or the caller's claim no longer held, so nothing changed. */
struct PinLaterCheckpointJobsResponse {
  1: required list<bool> applied
}

/** A key, and the queue of which it is. */
struct PinLaterJobKey {
  /** Empty for a key of all queues. */
  1: required string queueName
  2: required string key
}

struct PinLaterLookupJobRequest {
  /** Of any queues and shards. */
  1: required list<string> jobDescriptors
  2: optional bool includeBody = 0
  /** The jobs that hold these keys, too. */
  100: optional list<PinLaterJobKey> keys
}

/** The complete record of a job. */
struct PinLaterJobInfo {
  1: required string jobDescriptor
  2: required PinLaterJobState jobState
  10: required i32 attemptsAllowed
  3: required i32 attemptsRemaining
  4: required string customStatus
  5: required i64 createdAtTimestampMillis
  6: optional i64 runAfterTimestampMillis
  /** When the job became what it is. IN_PROGRESS: when it was claimed, or its claim was renewed last;
      SUCCEEDED, FAILED: when it ended. Of a job that has ended no time of its claim is kept. */
  7: optional i64 updatedAtTimestampMillis
  /** Of a job that is IN_PROGRESS; or of the last claim, when SUCCEEDED or FAILED. It is
      HOST:PORT:STARTMILLIS:SOURCE:COUNTER, where SOURCE is that of the client that holds it. */
  8: optional string claimDescriptor
  /** Look-ups with includeBody only. */
  9: optional binary body
  /** The key that the job holds, if it has one. */
  100: optional string key
  101: optional i64 expiresAtTimestampMillis
  /** Why the job ended, if that was neither an ack nor a time-out: "expired". */
  102: optional string endReason
  /** Whether it is a key of all queues. */
  103: optional bool keyOfAllQueues
  /** As they were enqueued, whatever became of the run-after since. */
  104: optional i64 runAfterTimestampMicros
  105: optional i64 expiresAtTimestampMicros
}

struct PinLaterGetJobCountRequest {
  1: required string queueName
  2: required PinLaterJobState jobState
  /** Default: all priorities. */
  3: optional byte priority
  /** Count jobs with run-after in the future, instead of the others. */
  4: optional bool countFutureJobs = 0
  /** RE2 syntax, searched anywhere in the body. */
  5: optional string bodyRegexToMatch
}

struct PinLaterScanJobsRequest {
  1: required string queueName
  2: required PinLaterJobState jobState
  /** Default: all priorities. */
  3: optional byte priority
  /** Scan jobs with run-after in the future, instead of the others. */
  4: optional bool scanFutureJobs = 0
  /** CONTINUATION_START, or the continuation of the previous answer. */
  5: optional string continuation = CONTINUATION_START
  /** Maximum number of jobs in this answer; at least 1, at most scan_limit. */
  6: optional i32 limit = 100
  /** RE2 syntax, searched anywhere in the body. */
  7: optional string bodyRegexToMatch
  /** SUCCEEDED and FAILED jobs only: in the order of their ends, the most recent first, whatever
      their run-after. */
  100: optional bool newestEndFirst = 0
  /** Answer after so long with what was found by then, and a continuation. At least 1. */
  101: optional i32 maxMillis
  /** SUCCEEDED and FAILED jobs only: those that ended before this time, or not before. */
  102: optional i64 endedBeforeMillis
  103: optional i64 endedSinceMillis
  /** RE2 syntax, searched anywhere in the custom status. */
  104: optional string statusRegexToMatch
  /** What the last attempt in the custom status says, and where: with # for numbers, quoted texts,
      addresses and UUIDs (pinlaterd/signature.py). */
  105: optional string message
  106: optional string place
  /** The source of the last claim. */
  107: optional string worker
  /** Answer without the shards that are unavailable, as long as there is another one, and name them
      in missingShards. */
  108: optional bool acceptPartial = 0
}

struct PinLaterScanJobsResponse {
  /** Most recent run-after first. Without bodies. */
  1: required list<PinLaterJobInfo> scannedJobs
  /** Where the next call continues, also if scannedJobs is empty; CONTINUATION_END if nothing is
      left. */
  2: optional string continuation = CONTINUATION_END
  /** At how many jobs this call has looked, and of about how many in that state and priority; not
      given while these are being counted. */
  100: optional i64 lookedAt
  101: optional i64 inState
  /** With acceptPartial: the shards without which this was answered; not given if there are none. */
  102: optional list<string> missingShards
}

struct PinLaterRetryFailedJobsRequest {
  1: required string queueName
  /** With any field from 100 on, 0 stands for all priorities. */
  2: optional byte priority = 1
  /** Attempts remaining; attempts allowed is raised to it if lower. At least 1. */
  3: optional i32 attemptsToAllow = 1
  /** Default: now. */
  4: optional i64 runAfterTimestampMillis
  /** Maximum number of jobs over all shards; at least 1. */
  5: optional i32 limit = 1000
  /** These jobs only, all of the queue; then `limit` does not count. One that is not FAILED any more
      is left as it is. */
  100: optional list<string> jobDescriptors
  /** RE2 syntax, searched anywhere in the body. */
  101: optional string bodyRegexToMatch
  /** Jobs that ended before this time only: those that fail meanwhile stay. */
  102: optional i64 endedBeforeMillis
  /** Spread run-after evenly from runAfterTimestampMillis on, so that `limit` jobs, or all that are
      named, take so long to become ready. */
  103: optional i64 spreadMillis
  /** Change nothing; return how many jobs there are to be changed. */
  104: optional bool dryRun = 0
  /** As in PinLaterScanJobsRequest. */
  105: optional i64 endedSinceMillis
  106: optional string statusRegexToMatch
  107: optional string message
  108: optional string place
  109: optional string worker
}

struct PinLaterDeleteJobsRequest {
  1: required string queueName
  2: required PinLaterJobState jobState
  /** With any field from 100 on, 0 stands for all priorities. */
  3: optional byte priority = 1
  /** RE2 syntax, searched anywhere in the body. */
  4: optional string bodyRegexToMatch
  /** Maximum number of jobs over all shards; at least 1. */
  5: optional i32 limit = 1000
  /** These jobs only, all of the queue; then `limit` does not count. One that is not in jobState any
      more is left as it is. */
  100: optional list<string> jobDescriptors
  /** SUCCEEDED and FAILED jobs only: those that ended before this time. */
  101: optional i64 endedBeforeMillis
  /** Change nothing; return how many jobs there are to be changed. */
  102: optional bool dryRun = 0
  /** As in PinLaterScanJobsRequest. */
  103: optional i64 endedSinceMillis
  104: optional string statusRegexToMatch
  105: optional string message
  106: optional string place
  107: optional string worker
}

/**
 * Each method describes its effect, then its own errors. Any method may also answer UNKNOWN
 * (invalid request, overloaded), and any that needs shards NO_HEALTHY_SHARDS or
 * SHARD_CONNECTION_FAILED. "Holds" is true once the answer has been read; servers of this
 * interface are tested by it.
 */
service PinLater {

  /**
   * Create a queue, on all shards, dequeue-only ones too. Idempotent. Names are checked for all
   * shards before anything is created, and so is the number of queues: the setting max_queues (10,000)
   * bounds it. A shard that joins later gets every queue.
   *
   * Errors: QUEUE_NAME_INVALID, QUEUE_NAME_TOO_LONG; UNKNOWN, "invalid request: ", where there are
   * max_queues queues already.
   * Holds: getQueueNames has it; enqueue and dequeue find it on every healthy shard.
   */
  void createQueue(1: RequestContext context, 2: string name)
    throws (1: PinLaterException e)

  /**
   * Drop a queue and all its jobs, on all shards; nothing is dropped unless all are healthy. No
   * queue of that name is no error.
   *
   * Errors: PASSWORD_INVALID, SHARD_CONNECTION_FAILED naming the shards that are down.
   * Holds: getQueueNames lacks it; a new queue of the same name is empty, and reuses none of
   * the old descriptors.
   */
  void deleteQueue(1: RequestContext context, 2: string name, 3: string password)
    throws (1: PinLaterException e)

  /**
   * Store jobs. Up to enqueue_split_jobs of them go into one enqueueable shard, in one transaction:
   * all are stored, or none is. Larger requests are split over shards. If a shard
   * fails before it may have committed, the router uses another one.
   *
   * Errors: QUEUE_NOT_FOUND, PRIORITY_NOT_SUPPORTED, ENQUEUE_REJECTED, NO_HEALTHY_SHARDS: nothing
   * was stored. SHARD_CONNECTION_FAILED: the outcome is unknown, and the server does not try again,
   * so that no job is stored twice; for a request that was split, jobDescriptors of the error has
   * the outcome of each job.
   * Jobs with keys are stored by the shards that are responsible for these, and by no others: so a
   * request with several may be split, whatever its length. While such a shard is down it waits, then
   * SHARD_CONNECTION_FAILED. It may be repeated in any case, until each job has a descriptor.
   * Holds: one descriptor for each job, in their order; each job is durable and can be looked up.
   */
  PinLaterEnqueueResponse enqueueJobs(1: RequestContext context, 2: PinLaterEnqueueRequest request)
    throws (1: PinLaterException e)

  /**
   * Claim up to `limit` pending jobs whose run-after has come: higher priorities first over all
   * covered shards, within a priority the earliest run-after first, for each shard. They become
   * IN_PROGRESS. Claims whose answer cannot be delivered go back to PENDING at once.
   *
   * The acks in jobAckRequest go first, and are carried out whatever the outcome of the dequeue,
   * unless the call is refused before it is read (see there). If one fails, nothing is claimed and its
   * error is the answer.
   *
   * A queue with a rate limit grants min(limit, tokens) jobs, and takes tokens only for claimed
   * jobs.
   *
   * Errors: QUEUE_NOT_FOUND, DEQUEUE_RATE_LIMITED.
   * Holds: no job of priority 2 was claimed while a covered shard held a ready one of priority 1;
   * no other call gets these jobs while the claims last; fewer than `limit` means that no covered
   * healthy shard had more, or that the rate, max_response_bytes or the memory that the server has
   * for answers was reached.
   */
  PinLaterDequeueResponse dequeueJobs(1: RequestContext context, 2: PinLaterDequeueRequest request)
    throws (1: PinLaterException e)

  /**
   * End the run of jobs. Succeeded: IN_PROGRESS becomes SUCCEEDED. Failed: with more than one
   * attempt remaining it becomes PENDING with one attempt less, run-after now + retryDelayMillis;
   * else FAILED with 0 remaining. The custom status is appended to.
   *
   * An ack of a job that is not IN_PROGRESS, or whose given claim no longer holds, changes nothing
   * and is no error: acks can be repeated safely. A malformed descriptor, or one of another queue or
   * of an unknown shard, fails alone: the others are carried out, then the answer is UNKNOWN and
   * names the bad ones.
   *
   * Errors: QUEUE_NOT_FOUND, UNKNOWN as above.
   * Holds: each job whose claim held is in its new state, durably.
   */
  void ackDequeuedJobs(1: RequestContext context, 2: PinLaterJobAckRequest request)
    throws (1: PinLaterException e)

  /**
   * End jobs as ackDequeuedJobs does, and tell which acks applied. An extension: older servers
   * answer with a TApplicationException (unknown method).
   *
   * Errors: as for ackDequeuedJobs; UNKNOWN, `invalid request: ` for a job that is named twice.
   * Holds: each job whose ack applied is in its new state, durably.
   */
  PinLaterJobAckResponse ackJobs(1: RequestContext context, 2: PinLaterJobAckRequest request)
    throws (1: PinLaterException e)

  /**
   * End jobs, or have them tried again, claimed or not: for programs that run jobs without a claim
   * of their own. Unlike an ack it applies to PENDING jobs, too, also before their run-after. Of
   * equal finishes at the same time one is DONE. An extension, as ackJobs is.
   *
   * Errors: QUEUE_NOT_FOUND; UNKNOWN naming bad descriptors, or `invalid request: ` for a job that
   * is named twice and for numbers out of range: nothing was done on shards that found one.
   * Holds: each job whose outcome is DONE is in its new state, durably.
   */
  PinLaterFinishJobsResponse finishJobs(1: RequestContext context, 2: PinLaterFinishJobsRequest request)
    throws (1: PinLaterException e)

  /**
   * Change jobs while they run, and renew their claims: run-after is set (given, else now), and, if
   * given, body, attempts, custom status and state. Applies while the job is IN_PROGRESS and
   * claimed by the caller; else it changes nothing and is no error.
   *
   * Errors: QUEUE_NOT_FOUND, UNKNOWN naming bad descriptors, as for acks.
   * Holds: each job whose claim held has the given values, durably, and its time-out starts now.
   */
  void checkpointJobs(1: RequestContext context, 2: PinLaterCheckpointJobsRequest request)
    throws (1: PinLaterException e)

  /**
   * Change jobs as checkpointJobs does, and tell which checkpoints applied. An extension: older
   * servers answer with a TApplicationException (unknown method).
   *
   * Errors: as for checkpointJobs; UNKNOWN, `invalid request: ` for a job that is named twice.
   * Holds: as for checkpointJobs.
   */
  PinLaterCheckpointJobsResponse applyCheckpoints(
      1: RequestContext context, 2: PinLaterCheckpointJobsRequest request)
    throws (1: PinLaterException e)

  /**
   * The records of jobs, by descriptor, over queues and shards. Unknown jobs, shards and queues
   * are left out.
   *
   * Errors: UNKNOWN, `invalid request: the answer would have more than N bytes; look up fewer jobs at
   * a time`, N being max_frame_bytes.
   * Holds: every job that exists is in the map, under the descriptor that was asked for; one that
   * was looked up by its key, under its own.
   */
  map<string, PinLaterJobInfo> lookupJobs(
      1: RequestContext context, 2: PinLaterLookupJobRequest request)
    throws (1: PinLaterException e)

  /**
   * How many jobs are in a state, with run-after up to now (countFutureJobs: later than now), of
   * all priorities or one, with a matching body if a pattern is given. Counted up to count_limit
   * for each shard and priority. The count ends when its connection is closed.
   *
   * Errors: QUEUE_NOT_FOUND, PRIORITY_NOT_SUPPORTED, UNKNOWN for a bad pattern; UNKNOWN `did not
   * end in time` if it takes longer than four fifths of request_timeout_ms: there is no number that
   * would be right then. To count more jobs, scan them.
   */
  i32 getJobCount(1: RequestContext context, 2: PinLaterGetJobCountRequest request)
    throws (1: PinLaterException e)

  /** The names of all queues. */
  set<string> getQueueNames(1: RequestContext context)
    throws (1: PinLaterException e)

  /**
   * Jobs in a state, most recent run-after first, merged over shards, without bodies. The answer's
   * continuation resumes right after its last job, stable while jobs come and go. A scan that
   * takes longer than four fifths of request_timeout_ms is answered with the jobs found by then,
   * perhaps none, and a continuation: only CONTINUATION_END means that nothing is left. So is one
   * whose jobs have more than 2 MiB of custom statuses on a shard, with those that fit, and one of
   * more than 1,000 jobs by their ends where these are unequally divided over shards. Of
   * scans that ran out of time each shard keeps up to 16 for a minute. The same call from the same
   * source, with that continuation, goes on with one; any other begins a search of its own behind
   * the continuation. With maxMillis the answer comes after so long. What was looked at need not be
   * searched again: a continuation may be further than the last job that was found.
   * A scan ends when its connection is closed.
   *
   * Errors: QUEUE_NOT_FOUND, PRIORITY_NOT_SUPPORTED, CONTINUATION_INVALID, UNKNOWN for a bad
   * pattern.
   * Holds: going on until CONTINUATION_END meets each job that was in that state throughout,
   * once; with acceptPartial each of those on shards that no answer names in missingShards.
   */
  PinLaterScanJobsResponse scanJobs(1: RequestContext context, 2: PinLaterScanJobsRequest request)
    throws (1: PinLaterException e)

  /**
   * Make failed jobs of a priority PENDING again, up to `limit` over all shards, the longest failed
   * first. Their claim descriptors are cleared. Returns how many: fewer than `limit` if there are no
   * more, or if half of request_timeout_ms is used before. To change more, repeat the call until it
   * returns 0.
   *
   * With any field from 100 on it retries those jobs that all of these choose, in no order. A server
   * that lacks these fields ignores them; but it refuses priority 0.
   *
   * Errors: QUEUE_NOT_FOUND, PRIORITY_NOT_SUPPORTED, UNKNOWN naming bad descriptors or for a bad
   * pattern: nothing was done. UNKNOWN `did not end in time` as deleteJobs.
   */
  i32 retryFailedJobs(1: RequestContext context, 2: PinLaterRetryFailedJobsRequest request)
    throws (1: PinLaterException e)

  /**
   * Delete up to `limit` jobs of a state and priority, with a matching body if a pattern is given.
   * Returns how many, as retryFailedJobs does. To change more, repeat the call until it returns 0.
   * Fields from 100 on choose jobs as there.
   *
   * Errors: QUEUE_NOT_FOUND, PRIORITY_NOT_SUPPORTED, UNKNOWN for bad descriptors or a bad pattern; UNKNOWN `did not
   * end in time` if the search for the pattern takes a shard longer than four fifths of
   * request_timeout_ms before it has deleted a job; other shards may have deleted some.
   */
  i32 deleteJobs(1: RequestContext context, 2: PinLaterDeleteJobsRequest request)
    throws (1: PinLaterException e)
}
