-- Scripts that change or remove jobs in slices. Follows jobs.lua; each by its name. Arguments begin
-- with token, lease in ms and queue, and results with OK.

local jobs = open_jobs()
local scripts = {}
local queue

-- A bound below all scores that stand for `ms` or a later time.
local function before(ms)
  return '(' .. bound(first_score(queue, ms))
end

-- Give jobs that PinLater made scores that order them by id within a millisecond (common.lua), and
-- a run-after, which a claim would lose; remove what is no job's number. Arguments: priority, lowest and highest score, offset, limit.
-- Returns how many were looked at.
function scripts.rescore()
  local priority, low, high, offset, limit = take(), take(), take(), take(), take()
  local set = set_key(queue, priority, PENDING)
  local problem = damage(set, 'zset')
  if problem then
    return problem
  end
  local rows = redis.call('ZRANGEBYSCORE', set, low, high, 'WITHSCORES', 'LIMIT', offset, limit)
  for at = 1, #rows, 2 do
    local id, ms = rows[at], ms_of(queue, rows[at + 1])
    if not jobs.is_id(id) then
      redis.call('ZREM', set, id)
    elseif score_of(queue, ms, #id) ~= tonumber(rows[at + 1]) and ms <= LATEST_ORDERED_MS then
      redis.call('ZADD', set, 'XX', bound(score_of(queue, ms, #id)), id)
      if not is_lean(queue) and jobs.exists(queue, id) then
        redis.call('HSET', job_key(queue, id), 'ra', ms)
      end
    end
  end
  return { 'OK', #rows / 2 }
end

-- Remove jobs that a read found evicted. Arguments: of each priority and id.
function scripts.forget()
  while taken < #ARGV do
    local priority, id = take(), take()
    local is_damaged, is_there = jobs.damage(queue, priority), jobs.exists(queue, id)
    if not (is_damaged or is_there) then
      jobs.free_options(queue, id)
    end
    for _, state in ipairs(is_damaged and {} or { PENDING, IN_PROGRESS, SUCCEEDED, FAILED }) do
      if not is_there then
        jobs.leave(queue, priority, id, state)
      end
      if has_runs(queue, state) and not jobs.since(queue, priority, id, state) then
        redis.pcall('ZREM', set_key(queue, priority, state), id) -- the end of a run that is gone
      end
    end
  end
  return { 'OK' }
end

-- Make a job PENDING that was taken out of FAILED; whether it is there.
local function retry(priority, id, attempts, run_after, now)
  local job = jobs.read(queue, id, false)
  if not job then
    return false
  end
  local allowed = math.max(job.al or 0, attempts)
  jobs.change(queue, id, job, { al = allowed, ar = attempts, ra = run_after, ua = now })
  jobs.enter(queue, priority, id, PENDING, run_after)
  jobs.watch_again(queue, priority, id)
  return true
end

-- Whether a job is in a state; of jobs that have ended, whether it did before a time, if one is
-- given.
local function is_in(priority, id, state, before_ms)
  local since = jobs.since(queue, priority, id, state)
  return since and (not before_ms or state == PENDING or state == IN_PROGRESS or since < before_ms)
end

-- FAILED to PENDING, the longest failed first. Arguments: priority, attempts, run-after in ms,
-- limit, now_ms. Returns ids.
function scripts.retry_failed()
  local priority, attempts = take(), take_number()
  local run_after, limit, now = take_number(), take_number(), take_number()
  local problem = jobs.damaged_place(queue, priority)
  if problem then
    return problem
  end
  local retried = { 'OK' }
  jobs.visit_first(queue, priority, FAILED, '-inf', '+inf', limit, function(id)
    retry(priority, id, attempts, run_after, now)
    retried[#retried + 1] = id
  end)
  return retried
end

-- The same of jobs that are FAILED still. Arguments: attempts, the time in ms before which they have
-- to have failed (or ''), now_ms, then of each priority, id and run-after. Returns priority and id
-- of those retried.
function scripts.retry_found()
  local attempts, before_ms, now = take_number(), take_number(), take_number()
  local is_sound, retried = {}, { 'OK' }
  while taken < #ARGV do
    local priority, id, run_after = take(), take(), take_number()
    if is_sound[priority] == nil then
      is_sound[priority] = not jobs.damaged_place(queue, priority)
    end
    if
      is_sound[priority]
      and is_in(priority, id, FAILED, before_ms)
      and jobs.leave(queue, priority, id, FAILED)
      and retry(priority, id, attempts, run_after, now)
    then
      retried[#retried + 1] = priority
      retried[#retried + 1] = id
    end
  end
  return retried
end

-- Delete the first jobs of a state: the first to be handed out, or the oldest. Arguments: state,
-- limit, the time in ms that they have to be before (or ''), priorities. Returns priority and id of
-- each.
function scripts.delete_first()
  local state, limit, before_ms = take(), take_number(), take_number()
  local deleted = { 'OK' }
  while taken < #ARGV and limit > 0 do
    local priority = take()
    local set = set_key(queue, priority, state)
    if not (jobs.damage(queue, priority) or damage(set, 'zset')) then
      local most = before_ms and before(before_ms) or '+inf'
      limit = limit - jobs.visit_first(queue, priority, state, '-inf', most, limit, function(id)
        jobs.remove(queue, id)
        deleted[#deleted + 1] = priority
        deleted[#deleted + 1] = id
      end)
    end
  end
  return deleted
end

-- Delete jobs that are in a state still. Arguments: state, the time in ms before which they have to
-- have ended (or ''), then of each priority and id. Returns priority and id of those deleted.
function scripts.delete_found()
  local state, before_ms = take(), take_number()
  local deleted = { 'OK' }
  while taken < #ARGV do
    local priority, id = take(), take()
    if
      (not before_ms or is_in(priority, id, state, before_ms))
      and jobs.leave(queue, priority, id, state)
      and jobs.remove(queue, id)
    then
      deleted[#deleted + 1] = priority
      deleted[#deleted + 1] = id
    end
  end
  return deleted
end

local MOST_BACKOFF_DOUBLINGS = 24

-- End claims last renewed between two times. Arguments: those times in ms, limit, now_ms,
-- backoff_attempts, priorities. Returns how many failed for good, then priority, id and run-after of
-- the others.
function scripts.release_expired()
  local after, before_ms, limit, now = take_number(), take_number(), take_number(), take_number()
  local backoff_attempts = take_number()
  -- A foreign writer's score may be of no time.
  local least = '-inf'
  if after >= -LATEST_ORDERED_MS then
    least = bound(first_score(queue, after + 1))
  end
  local failed, result = 0, { 'OK', 0 }
  while taken < #ARGV and limit > 0 do
    local priority = take()
    if not jobs.damaged_place(queue, priority) then
      local most = before(before_ms)
      local function expire(id, since, claim)
        local job = jobs.read(queue, id, false)
        job.cd, job.ra = claim or job.cd, job.ra or since
        local retry_ms = now
        if backoff_attempts > 0 then
          local doublings = math.max(0, backoff_attempts - (job.ar or 1) + 1)
          retry_ms = now + 1000 * 2 ^ math.min(doublings, MOST_BACKOFF_DOUBLINGS)
        end
        if jobs.fail(queue, priority, id, job, retry_ms, job.cs, now) then
          result[#result + 1] = priority
          result[#result + 1] = id
          result[#result + 1] = retry_ms
        else
          failed = failed + 1
        end
      end
      limit = limit
        - jobs.visit_first(queue, priority, IN_PROGRESS, least, most, limit, expire)
    end
  end
  result[2] = failed
  return result
end

-- Fail PENDING jobs whose expiry has come. Arguments: limit, now_ms, when to look again at those in
-- progress, most characters of a status. Returns how many were looked at, then priority and id of
-- those that failed.
function scripts.expire_jobs()
  local limit, now, again_ms, status_chars = take(), take_number(), take(), take_number()
  local checks = checks_key(queue)
  local problem = damage(checks, 'zset') or damage(expiries_key(queue), 'hash')
  if problem then
    return problem
  end
  local due = redis.call('ZRANGEBYSCORE', checks, '-inf', now, 'LIMIT', 0, limit)
  local result = { 'OK', #due }
  for _, member in ipairs(due) do
    local priority, id = string.match(member, '^(%d+) (%d+)$')
    local is_damaged = not id or jobs.damaged_place(queue, priority)
    if not is_damaged and jobs.expire(queue, priority, id, now, status_chars) then
      result[#result + 1] = priority
      result[#result + 1] = id
    elseif not is_damaged and jobs.since(queue, priority, id, IN_PROGRESS) then
      redis.call('ZADD', checks, again_ms, member)
    else
      redis.call('ZREM', checks, member)
    end
  end
  return result
end

local problem = begin_write(false)
if problem then
  return problem
end
queue = take()
local result = scripts[ARGV[1]]()
flush_runs()
return result
