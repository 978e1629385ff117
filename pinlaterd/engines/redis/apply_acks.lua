-- Acks. Of each op: runs that succeeded, runs that failed. A run: how many, priority, text, delay
-- in ms, '1' if each names its claim; then ids; then those claims.

local function held_by(queue, priority, id, claim)
  local job = held_claim(queue, priority, id)
  if job and (claim == nil or job.claim == claim) then
    return job
  end
  return nil
end

-- Note the end of a job in its hash; false if there is none, or it is not held by `claim`.
local function note_success(key, text, claim)
  if claim ~= nil and redis.pcall('HGET', key, 'cd') ~= claim then
    return false
  end
  local added = redis.pcall('HSET', key, 'ua', now_seconds)
  if added ~= 0 and not is_left(key, added) then
    return false
  end
  if text ~= '' then
    -- As PinLater does here: the text of an ack replaces what was there.
    redis.call('HSET', key, 'cs', cut(text, status_chars))
  end
  return true
end

-- Those of `ids` that end, as they are held by their claims, and not evicted; what their hashes say
-- of the end is written.
local function ending(queue, running, ids, text, claims)
  local prefix, held = job_key(queue, ''), scores_of(running, ids)
  local ended, ours = {}, {}
  for at = 1, #ids do
    local id, score = ids[at], held[at]
    if score then
      local key = prefix .. id
      if ours[score] == nil then
        ours[score] = score_of(ms_of(score), id) == tonumber(score)
      end
      if note_success(key, text, claims[at]) then
        if not ours[score] then
          -- A job that PinLater claimed gets the run-after that its score stood for.
          redis.call('HSETNX', key, 'ra', ms_of(score))
        end
        ended[#ended + 1] = id
      elseif redis.call('TYPE', key).ok ~= 'hash' then
        redis.call('ZREM', running, id) -- evicted
      end
    end
  end
  return ended
end

-- The claim in what plc_ holds.
local function claim_in(noted)
  return noted and string.match(noted, ' (.*)$')
end

local function ending_lean(queue, running, ids, text, claims)
  if redis.call('EXISTS', jobs_key(queue)) == 0 then
    remove_all(running, ids) -- evicted
    return {}
  end
  local held, named = scores_of(running, ids), #claims > 0
  local noted = named and texts_of(claims_key(queue), ids) or {}
  local changes = { ua = now, cs = cut(text, status_chars) }
  local ended = {}
  for at = 1, #ids do
    local id = ids[at]
    if held[at] and (not named or claims[at] == claim_in(noted[at])) then
      if text == '' or change_job(queue, id, changes, false) then
        ended[#ended + 1] = id
      else
        redis.call('ZREM', running, id) -- removed by a hand
      end
    end
  end
  return ended
end

-- Returns how many did. What is the same for all is done once for all.
local function succeed(queue, priority, ids, text, claims)
  local running = set_key(queue, priority, IN_PROGRESS)
  local ended = (is_lean(queue) and ending_lean or ending)(queue, running, ids, text, claims)
  local scores = {}
  for at, id in ipairs(ended) do
    scores[2 * at - 1], scores[2 * at] = score_now[#id], id
  end
  add_all(set_key(queue, priority, SUCCEEDED), scores)
  return remove_all(running, ended) -- one that is given twice ends once
end

-- Returns how many did; adds to `requeued` those that are PENDING again.
local function fail(queue, priority, ids, text, claims, delay, requeued)
  local retry_ms = math.min(now + delay, latest_ms)
  local ended = 0
  for at, id in ipairs(ids) do
    local job = held_by(queue, priority, id, claims[at])
    if job then
      local status = text == '' and job.status or cut(text, status_chars)
      if fail_attempt(job, queue, priority, retry_ms, status, now) then
        requeue(requeued, priority, id, retry_ms)
      end
      ended = ended + 1
    end
  end
  return ended
end

-- How many of all runs did what `end_run` does, and how many did not.
local function each_run(end_run)
  local done, all = 0, 0
  for _ = 1, take_number() do
    local count, priority, text = take_number(), take(), take()
    local delay, named = take_number(), take() == '1'
    local ids = take_all(count)
    local claims = named and take_all(count) or {}
    done = done + end_run(priority, ids, text, claims, delay)
    all = all + count
  end
  return done, all - done
end

local acks = each_op(function(queue)
  local result = { 0, 0, 0 }
  local succeeded, not_succeeded = each_run(function(priority, ids, text, claims)
    return succeed(queue, priority, ids, text, claims)
  end)
  local failed, not_failed = each_run(function(priority, ids, text, claims, delay)
    return fail(queue, priority, ids, text, claims, delay, result)
  end)
  result[1], result[2], result[3] = succeeded, failed, not_succeeded + not_failed
  return result
end)
