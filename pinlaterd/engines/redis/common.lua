-- The beginning of every script of this engine: the keys, what is in them, and what all scripts
-- share.
--
-- This is PinLater's layout, and its jobs are served as they stand. SHARD is the shard's name, ID a
-- job's number in decimal digits, without leading zeros. Times are seconds with fraction; they are
-- read by rounding to milliseconds.
--
--   pln_SHARD                 sorted set: the names of queues, by when they were created
--   plj_SHARD_QUEUE           counter: the last id given to a job of the queue, of any priority.
--                             It stays when the queue is deleted: no id is given twice
--   plh_SHARD_QUEUE.ID        hash, a job:
--                               bd  body                  al  attempts allowed
--                               cs  custom status         ar  attempts remaining
--                               ca  created at            cd  claim descriptor, of the last claim
--                               ua  updated at; a claim leaves it, so that a release finds it again
--                               ra  run-after in ms; a job of PinLater has none before it is read
--                                   as PENDING (rescore): its score counts
--   plq_SHARD_QUEUE.pP_sS     sorted set: ids of the jobs of priority P in state S (0 PENDING,
--                             1 IN_PROGRESS, 2 SUCCEEDED, 3 FAILED); its score is the run-after
--                             where PENDING, else the time at which the job came to be in that
--                             state (IN_PROGRESS: was claimed, or last checkpointed)
--
-- A queue that we create has a leaner layout, by default (redis_layout): few commands store, claim or
-- end a thousand jobs. Its name in keys, but that of its counter, begins with '+', as no client's can,
-- and is not in pln_SHARD: PinLater, and releases that don't know it, leave it alone. Times there are
-- in ms:
--
--   pls_SHARD                 sorted set: the names of lean queues, by when they were created
--   plb_SHARD_+QUEUE          hash, jobs by their ids, as they were enqueued: 'AL CA RA N;', N bytes
--                             of status, body. What decides whether there is such a job
--   plu_SHARD_+QUEUE          hash: what has changed since, if anything has: 'AL AR UA RA;', status
--   plq_SHARD_+QUEUE.pP_s0    sorted set: PENDING jobs as in PinLater's layout, with other scores
--   plx_SHARD_+QUEUE.pP       sorted set: the jobs that are not PENDING, in runs: jobs with
--                             consecutive ids, in one state since one time, whose claims count up.
--                             The member 'S FIRST LAST MS NUMBER CLAIMER' has LAST as its score;
--                             CLAIMER and NUMBER are the first one's claim (without NUMBER all of
--                             it, and the run is of one job). The member '1', '2' or '3' has as its
--                             score how many jobs of that state there are beside one a run, negated
--   plq_SHARD_+QUEUE.pP_sS    sorted set: LAST of the runs of that state, by the time
--
-- and what is ours:
--
--   plk_SHARD_QUEUE           hash, of a queue in which a job with a key was ever enqueued, in either
--                             layout: by key, 'P ID' of the job that holds it. Free where there is
--                             no such job: PinLater removes jobs without their keys
--   plk_SHARD_                hash, of keys of all queues: by key, 'P ID QUEUE'
--   plv_SHARD_QUEUE           hash, the reverse: keys by ID, each behind '=', or '*' if of all queues
--   ply_SHARD_QUEUE           hash, of a queue in which a job with an expiry was ever enqueued: by
--                             ID, from when on the job is not handed out any more, in ms; if it has
--                             failed since then, ' ' and its end reason behind that
--   plz_SHARD_QUEUE           hash, of a queue in which a job with times in microseconds was ever
--                             enqueued: by ID, run-after and expiry, ' ' between; either may be ''
--   plc_SHARD_QUEUE           sorted set: 'P ID' of those jobs that maintenance has to look at, by
--                             when, in ms. Of a PENDING job: its expiry. It may name jobs that are
--                             gone
--   plm_SHARD                 hash, what the shard remembers of its owners:
--                               owner     the token of the owner; empty after an end in order
--                               fence     how many owners there were: the first part of a token
--                               start_ms  when the last owner began
--                               placement the highest number that StorageEngine.fence was raised to
--                               epoch     of the latest term in which it was opened, where several
--                               server    servers share the shards, and by which of them
--                               dropped   how many sets of deleted queues there ever were
--   plo_SHARD                 the owner's token, FENCE:START_MS:WHO, for as long as its lease lasts
--   plt_SHARD                 list: keys of deleted queues' sets, whose jobs are yet to be removed
--   plt_SHARD_QUEUE.N         such a set
--
-- A job is in the state whose set or run holds its id, and in none if none does: then its hash is
-- a deleted queue's. An id whose hash is gone was evicted: such an id is removed when it is met. So
-- is one where something else than a hash lies, and a member that can be no job's number. A field
-- that should be a number and is none counts as missing.
--
-- Something else than a sorted set in place of one, or than a hash in a lean queue, is a foreign
-- writer's doing that only an operator can mend: what needs that key writes nothing at all
-- (`damage`), and a read finds no jobs there.
--
-- Scores. Redis orders equal scores by the bytes of the member, so that "10" comes before "9". So
-- scores say how many digits the id has, behind the time: the order of a set is the order by (ms,
-- id). In a lean queue a score is 32 * ms + digits: whole numbers are what Redis reads and writes
-- fastest. In PinLater's layout, whose scores are whole milli- or microseconds, ours are later than
-- the time by less than half a millisecond that grows with the digits, and rounding gives the very
-- ms; half a microsecond in each keeps them apart from PinLater's. PENDING jobs of PinLater's are
-- given such scores when they are read (rescore).
--
-- Arguments come in one flat list, read by `take`: the name of the script, SHARD, and what it says.
-- Whatever a client sent is an argument, never code. A run is at most RUN_JOBS (scripts.py) long,
-- so that all of it goes into one command: most of what a command costs does not depend on its
-- length. Closures are made whenever a script runs: apply.lua, which runs for each batch, keeps
-- those that it seldom needs within `open_jobs`.

local SHARD = ARGV[2]
local RECORD, LEASE = 'plm_' .. SHARD, 'plo_' .. SHARD
local PENDING, IN_PROGRESS, SUCCEEDED, FAILED = '0', '1', '2', '3'
-- Up to here, the year 4147, scores tell the digits apart; LIMITS promise no later run-after.
local LATEST_ORDERED_MS = 2 ^ 36 * 1000
local LATEST_MS = 2 ^ 63 - 1024
local START_OF_2020_MS = 1577836800000
local MOST_EXACT = 2 ^ 53 -- whole numbers up to here are such in Lua
local MANY, LONG_MEMBER = 32, string.rep('x', 65) -- as add_all needs it
local SIZES = { zset = 'ZCARD', hash = 'HLEN', list = 'LLEN', string = 'STRLEN' }

local taken = 2

local function take()
  taken = taken + 1
  return ARGV[taken]
end

local function take_number()
  return tonumber(take())
end

-- The next arguments, as a table.
local function take_all(count)
  local first = taken + 1
  taken = taken + count
  return { unpack(ARGV, first, taken) }
end

-- Jobs, in ranges of consecutive ids: how many ranges; of each its first id, how many jobs and, if
-- they are `named`, number and claimer of the first one's claim (see plx_). Returns them, and how
-- many jobs that are.
local function take_ranges(named)
  local ranges, jobs = {}, 0
  for nth = 1, take_number() do
    local range = { id = take(), size = take_number(), before = jobs }
    range.first = tonumber(range.id)
    range.last = range.first + (range.size - 1) -- exact for one id, however large
    if named then
      range.number, range.claimer = take_number(), take()
    end
    ranges[nth] = range
    jobs = jobs + range.size
  end
  return ranges, jobs
end

-- The ids of ranges, each by itself.
local function ids_of(ranges)
  local ids, count, format = {}, 0, string.format
  for _, range in ipairs(ranges) do
    count = count + 1
    ids[count] = range.id -- it may be more than Lua's numbers hold
    for nth = 1, range.size - 1 do
      count = count + 1
      ids[count] = format('%d', range.first + nth)
    end
  end
  return ids
end

-- Their claims, if they are named.
local function claims_of(ranges)
  local claims, count, format = {}, 0, string.format
  for _, range in ipairs(ranges) do
    local claimer, number = range.claimer, range.number
    for nth = 0, claimer and range.size - 1 or -1 do
      count = count + 1
      claims[count] = number and claimer .. format('%d', number + nth) or claimer
    end
  end
  return claims
end

local function is_lean(queue)
  return string.byte(queue) == 43 -- '+'
end

local function set_key(queue, priority, state)
  return 'plq_' .. SHARD .. '_' .. queue .. '.p' .. priority .. '_s' .. state
end

-- Of a queue in PinLater's layout.
local function job_key(queue, id)
  return 'plh_' .. SHARD .. '_' .. queue .. '.' .. id
end

-- Of a lean queue: its hashes.
local function jobs_key(queue)
  return 'plb_' .. SHARD .. '_' .. queue
end

local function updates_key(queue)
  return 'plu_' .. SHARD .. '_' .. queue
end

-- Of a queue in either layout: jobs by keys, and keys by ids.
local function holders_key(queue)
  return 'plk_' .. SHARD .. '_' .. queue
end

local function keys_key(queue)
  return 'plv_' .. SHARD .. '_' .. queue
end

-- Of a queue in either layout: expiries by ids, times in microseconds by ids, and jobs by when they
-- have to be looked at.
local function expiries_key(queue)
  return 'ply_' .. SHARD .. '_' .. queue
end

local function exact_key(queue)
  return 'plz_' .. SHARD .. '_' .. queue
end

local function checks_key(queue)
  return 'plc_' .. SHARD .. '_' .. queue
end

-- The same for a queue that is created again, in whichever layout.
local function counter_key(queue)
  return 'plj_' .. SHARD .. '_' .. (is_lean(queue) and string.sub(queue, 2) or queue)
end

local function score_of(queue, ms, digits)
  if is_lean(queue) then
    return 32 * ms + digits
  end
  return ms / 1000 + (23 * digits + 0.5) / 1000000
end

-- The least score that stands for `ms`.
local function first_score(queue, ms)
  return is_lean(queue) and 32 * ms or (ms - 0.5) / 1000
end

-- A score as an argument, in full precision.
local function bound(score)
  return string.format('%.17g', score)
end

-- Of infinite scores, too: those are a foreign writer's.
local function ms_of(queue, score)
  local number = tonumber(score)
  local ms = math.floor(is_lean(queue) and number / 32 or number * 1000 + 0.5)
  return math.max(-LATEST_ORDERED_MS, math.min(LATEST_MS, ms))
end

-- Add ids to a set, all at one time.
--
-- Redis keeps a small set as a list, which it reads from its beginning for each member: 128 members
-- cost three times as much as in a large set. A long member makes it a tree for as long as it is
-- not empty.
local function add_all(set, queue, ms, ids)
  local members, digits, score = {}, 0, nil
  local at = 1
  if #ids >= MANY then
    members[1], members[2] = '0', LONG_MEMBER
    at = 3
  end
  for nth = 1, #ids do
    local id = ids[nth]
    if #id ~= digits then
      digits = #id
      -- Of whole numbers this is the fastest form.
      score = string.format(is_lean(queue) and '%d' or '%.17g', score_of(queue, ms, digits))
    end
    members[at], members[at + 1] = score, id
    at = at + 2
  end
  if #ids > 0 then
    redis.call('ZADD', set, unpack(members))
  end
  if #ids >= MANY then
    redis.call('ZREM', set, LONG_MEMBER)
  end
end

-- The number in a field, or nil if there is none from `least` to `most`.
local function number_in(field, least, most)
  local number = tonumber(field or nil)
  if number and number >= least and number <= most then
    return math.floor(number)
  end
  return nil
end

-- What a queue's counter is at least when its shard is opened or it is created, and where it is
-- lost: an id that nobody can have given before (first_local_id in engines/base.py), whatever copy
-- of the keys this is. In PinLater's layout ids have 14 digits at most, until 2051: into the key of
-- a job PinLater's script for enqueues writes a longer one as 1.7637768000047e+15, and loses the job.
local function unused_id(queue, now_ms)
  local began = number_in(redis.call('HGET', RECORD, 'start_ms'), 0, LATEST_ORDERED_MS) or 0
  local ms = math.max(now_ms, began)
  return is_lean(queue) and ms * 1000 or math.max(ms - START_OF_2020_MS, 0) * 100
end

-- What a script returns, before it has written anything, where something else than `wanted` lies
-- under a key; nil if it does not.
local function damage(key, wanted)
  if type(redis.pcall(SIZES[wanted], key)) == 'number' then
    return nil
  end
  return { 'DAMAGED', key, redis.call('TYPE', key).ok, wanted }
end

-- Begin a script that writes: nil if the caller owns the shard still; else what the script has to
-- return, before it has written anything. The lease is renewed once half of it is over. A server
-- that takes no writes says so here, too. Redis refuses commands that need memory when it is full,
-- until a script has made its first write: with `grows` that is one that needs some, here or by the
-- caller, so that nothing is stored by halves; without it one that needs none, and acks and claims
-- go on.
local function begin_write(grows)
  local token, lease_ms = take(), take()
  local owner = redis.call('HGET', RECORD, 'owner')
  if owner ~= token then
    return { 'DEPOSED', owner or '' }
  end
  local written
  if 2 * redis.call('PTTL', LEASE) < tonumber(lease_ms) then
    written = not grows and redis.pcall('PEXPIRE', LEASE, lease_ms) or 0
    if written == 0 then
      written = redis.pcall('SET', LEASE, token, 'PX', lease_ms)
    end
  elseif not grows then
    written = redis.pcall('DEL', 'pl') -- no key of ours: it changes nothing
  end
  if type(written) == 'table' and written.err then
    return { 'REFUSED', written.err }
  end
  return nil
end
