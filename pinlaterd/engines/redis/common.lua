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
--                               ra  run-after in ms; a job of PinLater has none: its score counts
--   plq_SHARD_QUEUE.pP_sS     sorted set: ids of the jobs of priority P in state S (0 PENDING,
--                             1 IN_PROGRESS, 2 SUCCEEDED, 3 FAILED); its score is the run-after
--                             where PENDING, else the time at which the job came to be in that
--                             state (IN_PROGRESS: was claimed, or last checkpointed)
--
-- A queue that we create has a leaner layout, by default (redis_layout): two commands store a
-- thousand jobs, not a thousand and one. Its name in keys, but that of its counter, begins with
-- '+', as no client's can, and is not in pln_SHARD: PinLater, and releases that don't know it,
-- leave it alone. Its sets are the same; its jobs, by their ids, are in three hashes, and times
-- there in ms:
--
--   plr_SHARD                 sorted set: the names of lean queues, by when they were created
--   plb_SHARD_+QUEUE          a job as it was enqueued: 'AL CA N;', N bytes of status, body. What
--                             decides whether there is such a job
--   plc_SHARD_+QUEUE          its last claim, and its run-after before that: 'RA CD'; none while
--                             PENDING, as then the score is the run-after
--   plu_SHARD_+QUEUE          what has changed since, if anything has: 'AL AR UA;', status
--
-- and what is ours:
--
--   plm_SHARD                 hash, what the shard remembers of its owners:
--                               owner     the token of the owner; empty after an end in order
--                               fence     how many owners there were: the first part of a token
--                               start_ms  when the last owner began
--                               clean     1 after an end in order, else 0
--                               dropped   how many sets of deleted queues there ever were
--   plo_SHARD                 the owner's token, FENCE:START_MS:WHO, for as long as its lease lasts
--   plt_SHARD                 list: keys of deleted queues' sets, whose jobs are yet to be removed
--   plt_SHARD_QUEUE.N         such a set
--
-- A job is in the state whose set holds its id, and in none if no set does: then its hash is a
-- deleted queue's. An id whose hash is gone was evicted: such an id is removed when it is met. So
-- is one where something else than a hash lies, and a member that can be no job's number. A field
-- that should be a number and is none counts as missing.
--
-- Something else than a sorted set in place of one, or than a hash in a lean queue, is a foreign
-- writer's doing that only an operator can mend: nothing is written to that queue and priority
-- (`damage`), and a read finds no jobs there.
--
-- Scores. Redis orders equal scores by the bytes of the member, so that "10" comes before "9". The
-- scores that we write are therefore a little later than the time that they stand for, by an amount
-- that grows with the number of digits of the id and is less than half a millisecond. So the order
-- of a set is the order by (ms, id), and rounding gives the very ms. Half a microsecond in each
-- keeps them apart from scores of PinLater's, which are whole milli- or microseconds. PENDING jobs
-- of PinLater's are given such scores when they are read (rescore.lua).
--
-- Arguments come in one flat list, read by `take`. Whatever a client sent is an argument, never
-- code.

local SHARD = ARGV[1]
local RECORD, LEASE = 'plm_' .. SHARD, 'plo_' .. SHARD
local QUEUES, LEAN_QUEUES, DROPPED = 'pln_' .. SHARD, 'plr_' .. SHARD, 'plt_' .. SHARD
local PENDING, IN_PROGRESS, SUCCEEDED, FAILED = '0', '1', '2', '3'
local MOST_DIGITS = 19
-- Up to here, the year 4147, scores tell the digits apart; limits.py promises no later run-after.
local LATEST_ORDERED_MS = 2 ^ 36 * 1000
local LATEST_MS = 2 ^ 63 - 1024
local MOST_EXACT = 2 ^ 53 -- whole numbers up to here are such in Lua
local LAST_ID = '9223372036854775807'
local LARGEST_I32 = 2 ^ 31 - 1

local taken = 1

local function take()
  taken = taken + 1
  return ARGV[taken]
end

local function take_number()
  return tonumber(take())
end

-- nil for '-', else what follows '='
local function take_optional()
  local value = take()
  if value == '-' then
    return nil
  end
  return string.sub(value, 2)
end

local function set_key(queue, priority, state)
  return 'plq_' .. SHARD .. '_' .. queue .. '.p' .. priority .. '_s' .. state
end

local function job_key(queue, id)
  return 'plh_' .. SHARD .. '_' .. queue .. '.' .. id
end

local function is_lean(queue)
  return string.byte(queue) == 43 -- '+'
end

-- The names of the queues of the same layout.
local function queues_key(queue)
  return is_lean(queue) and LEAN_QUEUES or QUEUES
end

-- Of a lean queue: one of its three hashes.
local function jobs_key(queue)
  return 'plb_' .. SHARD .. '_' .. queue
end

local function claims_key(queue)
  return 'plc_' .. SHARD .. '_' .. queue
end

local function updates_key(queue)
  return 'plu_' .. SHARD .. '_' .. queue
end

-- The same for a queue that is created again, in whichever layout.
local function counter_key(queue)
  return 'plj_' .. SHARD .. '_' .. (is_lean(queue) and string.sub(queue, 2) or queue)
end

local function score_of_digits(ms, digits)
  return ms / 1000 + (23 * digits + 0.5) / 1000000
end

local function score_of(ms, id)
  return score_of_digits(ms, #id)
end

-- The scores of jobs at one time, as arguments, by how many digits their ids have. To put one into
-- words costs as much as a command.
local function scorer(ms)
  return setmetatable({}, {
    __index = function(known, digits)
      known[digits] = string.format('%.17g', score_of_digits(ms, digits))
      return known[digits]
    end,
  })
end

local function id_text(number)
  return string.format('%.0f', number)
end

-- Of infinite scores, too: those are a foreign writer's.
local function ms_of(score)
  local ms = math.floor(tonumber(score) * 1000 + 0.5)
  return math.max(-LATEST_ORDERED_MS, math.min(LATEST_MS, ms))
end

-- Whether a member of a set can be a job's number.
local function is_id(member)
  return string.find(member, '^[1-9][0-9]*$') ~= nil
    and (#member < MOST_DIGITS or (#member == MOST_DIGITS and member <= LAST_ID))
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
-- of the keys this is.
local function unused_id(now_ms)
  local began = number_in(redis.call('HGET', RECORD, 'start_ms'), 0, LATEST_ORDERED_MS) or 0
  return math.max(now_ms, began) * 1000
end

-- What is no number is left as it is: the first enqueue reports it.
local function raise_counter(queue, now_ms)
  local counter, least = counter_key(queue), unused_id(now_ms)
  local last = redis.pcall('GET', counter)
  local number = type(last) == 'string' and string.find(last, '^[0-9]+$') and tonumber(last)
  if last == false or (number and number < least) then
    redis.call('SET', counter, id_text(least))
  end
end

-- What a script returns, before it has written anything, where something else than `wanted` lies
-- under a key; nil if it does not.
local function damage(key, wanted)
  local found = redis.call('TYPE', key).ok
  if found == wanted or found == 'none' then
    return nil
  end
  return { 'DAMAGED', key, found, wanted }
end

-- The same of the sets of a queue and priority, and of a lean queue's hashes.
local function damaged_set(queue, priority)
  if is_lean(queue) then
    local problem = damage(jobs_key(queue), 'hash')
      or damage(claims_key(queue), 'hash')
      or damage(updates_key(queue), 'hash')
    if problem then
      return problem
    end
  end
  for _, state in ipairs({ PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
    local problem = damage(set_key(queue, priority, state), 'zset')
    if problem then
      return problem
    end
  end
  return nil
end

-- The score of a member, or nil; nil also in what is no set.
local function score_in(set, member)
  local score = redis.pcall('ZSCORE', set, member)
  return type(score) == 'string' and score or nil
end

local function seconds(ms)
  return string.format('%.3f', ms / 1000)
end

-- The text under an id in a hash of a lean queue, or nil; nil also in what is no hash.
local function text_in(hash, id)
  local text = redis.pcall('HGET', hash, id)
  return type(text) == 'string' and text or nil
end

-- A job of a lean queue by the names of fields that PinLater's have; nil if there is none. `body`:
-- whether that is wanted, too.
local function lean_job(queue, id, body)
  local record = text_in(jobs_key(queue), id)
  if not record then
    return nil
  end
  local allowed, created, bytes, at = string.match(record, '^(%d+) (%-?%d+) (%d+);()')
  local begin = (at or 1) + (bytes or 0)
  local created_seconds = seconds(created or 0)
  local job = {
    al = allowed, ar = allowed, ca = created and created_seconds, ua = created and created_seconds,
    cs = at and string.sub(record, at, begin - 1) or '',
    bd = body and string.sub(record, begin) or false,
  }
  local update = text_in(updates_key(queue), id)
  local al, ar, ua, text_at = string.match(update or '', '^(%d+) (%d+) (%-?%d+);()')
  if al then
    job.al, job.ar, job.ua, job.cs = al, ar, seconds(ua), string.sub(update, text_at)
  end
  job.ra, job.cd = string.match(text_in(claims_key(queue), id) or '', '^(%-?%d+) (.*)$')
  return job
end

-- Fields of a job of PinLater's layout, or nil if it has no hash.
local function fields_of(key, ...)
  local fields = redis.pcall('HMGET', key, ...)
  if fields.err then
    return nil
  end
  for at = 1, select('#', ...) do
    if fields[at] then
      return fields
    end
  end
  return redis.call('EXISTS', key) == 1 and fields or nil
end

-- Fields of a job of either layout, with the body last if that is among them; nil if it was
-- evicted.
local function job_fields(queue, id, ...)
  if not is_lean(queue) then
    return fields_of(job_key(queue, id), ...)
  end
  local count = select('#', ...)
  local job = lean_job(queue, id, select(count, ...) == 'bd')
  local fields = {}
  for at = 1, job and count or 0 do
    fields[at] = job[select(at, ...)] or false
  end
  return job and fields
end

local function job_exists(queue, id)
  if is_lean(queue) then
    return redis.pcall('HEXISTS', jobs_key(queue), id) == 1
  end
  return redis.call('TYPE', job_key(queue, id)).ok == 'hash'
end

-- Whether a job is there still, after a field was set that all of ours have: `added` is what that
-- answered. If it was evicted, what it left of itself goes.
local function is_left(key, added)
  if type(added) == 'table' then
    return false -- no hash
  end
  if redis.call('HLEN', key) > 1 then
    return true
  end
  redis.call('DEL', key)
  return false
end

-- The scores that stand for `ms`: from the first on, below the second.
local function window(ms)
  return (ms - 0.5) / 1000, (ms + 0.5) / 1000
end

-- A number as an argument of a bound, in full precision.
local function bound(score)
  return string.format('%.17g', score)
end

local function below(score)
  return '(' .. bound(score)
end

-- The rank of the first member behind (score, id). Within one score, members of one length are in
-- the order of their numbers.
local function rank_behind(set, score, id)
  local low = redis.call('ZCOUNT', set, '-inf', below(score))
  local high = low + redis.call('ZCOUNT', set, bound(score), bound(score))
  while low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call('ZRANGE', set, middle, middle)[1] > id then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Redis' Lua has room for some thousands on its stack.
local MOST_ARGUMENTS = 1000

-- One command for many: most of what a command costs here does not depend on its length. Returns
-- the sum of the answers. `key`: in front of the arguments, if any.
local function call_with_all(command, key, arguments)
  local sum = 0
  for at = 1, #arguments, MOST_ARGUMENTS do
    local last = math.min(at + MOST_ARGUMENTS - 1, #arguments)
    if key then
      sum = sum + redis.call(command, key, unpack(arguments, at, last))
    else
      sum = sum + redis.call(command, unpack(arguments, at, last))
    end
  end
  return sum
end

-- Of score, id, and so on.
local function add_all(set, scores_and_ids)
  return call_with_all('ZADD', set, scores_and_ids)
end

local function remove_all(set, ids)
  return call_with_all('ZREM', set, ids)
end

-- What `command` answers for each id of a set or hash; false for one that it does not hold.
local function values_of(command, key, ids)
  if #ids <= MOST_ARGUMENTS then
    return redis.call(command, key, unpack(ids))
  end
  local found = {}
  for at = 1, #ids, MOST_ARGUMENTS do
    local last = math.min(at + MOST_ARGUMENTS - 1, #ids)
    for offset, value in ipairs(redis.call(command, key, unpack(ids, at, last))) do
      found[at + offset - 1] = value
    end
  end
  return found
end

local function scores_of(set, ids)
  return values_of('ZMSCORE', set, ids)
end

-- Of a hash of a lean queue.
local function texts_of(hash, ids)
  return values_of('HMGET', hash, ids)
end

-- Begin a script that writes: nil if the caller owns the shard still, and then its lease is
-- renewed; else what the script has to return, before it has written anything. A server that takes
-- no writes says so here, too. Redis refuses commands that need memory when it is full, until a
-- script has made its first write: with `grows` that one is refused, so that nothing is stored by
-- halves; without it the first write is one that needs none, and acks and claims go on.
local function begin_write(grows)
  local token, lease_ms = take(), take()
  local owner = redis.call('HGET', RECORD, 'owner')
  if owner ~= token then
    return { 'DEPOSED', owner or '' }
  end
  local renewed = 0
  if not grows then
    renewed = redis.pcall('PEXPIRE', LEASE, lease_ms)
  end
  if renewed == 0 then
    renewed = redis.pcall('SET', LEASE, token, 'PX', lease_ms)
  end
  if type(renewed) == 'table' and renewed.err then
    return { 'REFUSED', renewed.err }
  end
  return nil
end

-- Whether a member of a set is no job, or one that was evicted; then it is removed.
local function forget_if_gone(set, queue, id)
  if is_id(id) and job_exists(queue, id) then
    return false
  end
  redis.call('ZREM', set, id)
  return true
end
